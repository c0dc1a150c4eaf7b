"""Random Llamas of the shape that `tiny_adapters.save_adapter` adapts."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig


def save_llama(folder: Path, vocab_size: int, max_len: int, *, seed: int = 0, **special: Any) -> None:
    """Save a model in fp32 for up to `max_len` tokens. Its weights are so large that what attention reads decides which
    token follows. `special` are ids of special tokens, such as `eos_token_id`, and other values of config.json."""
    torch.manual_seed(seed)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=max_len, initializer_range=0.2, **shape | special
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
