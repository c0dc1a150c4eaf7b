"""A tiny random model, and what makes `tiny_adapters` importable by the tests beside it."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """Weights so large that what attention reads decides which token follows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        eos_token_id=[2, 3],
    )
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path
