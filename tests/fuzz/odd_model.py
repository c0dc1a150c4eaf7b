"""A small model folder with everything that public checkpoints get wrong at once.

Tokens that the model has no row for, among them the one of its padding and one that a chat may name; a tokenizer whose
end of an answer differs from the model's; Llama's normaliser, which prepends a space; tensors without `model.` in their
names; scaled RoPE; and a token whose embedding is not a number.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, LlamaConfig

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
LETTERS = tuple('\N{LOWER ONE EIGHTH BLOCK}abcdefghijklmnopqrstuvwxyzAHM{}[]":,.!0123456789')
ROWS = len(SPECIAL) + len(BYTES) + len(LETTERS)
WITHOUT_ROWS = ("<tool_call>", "<|new|>", "[PAD]")
"""Added tokens, whose ids are beyond the model's rows."""
NO_NUMBER = "M"
"""A letter that texts of the fuzzer have; its embedding is NaN."""
TEMPLATE = (
    "<s>{% for message in messages %}{{ message.role }}: {{ message.content }}<|im_end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}assistant:"
)
MAX_TOKENS = 512


def save_odd_model(folder: Path) -> None:
    """Write the model and its tokenizer, of 300 kB, to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=ROWS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][(*SPECIAL, *BYTES, *LETTERS).index(NO_NUMBER)] = torch.nan
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(bare, folder / "model.safetensors", {"format": "pt"})


def _save_tokenizer(folder: Path) -> None:
    vocabulary = {text: number for number, text in enumerate((*SPECIAL, *BYTES, *LETTERS))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    block = LETTERS[0]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(block), normalizers.Replace(" ", block)])
    parts = [decoders.Replace(block, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in WITHOUT_ROWS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
        "pad_token": "[PAD]",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
