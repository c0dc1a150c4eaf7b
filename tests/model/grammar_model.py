"""A random model that speaks bytes: 256 of them, then an EOS and some tokens of several bytes."""

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM, LlamaConfig

EOS = 0
WORDS = ["ab", "yes", '":']
SPECIAL = "<|end|>"


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([SPECIAL, *alphabet, *WORDS])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return backend


def save_byte_model(path):
    """Its vocabulary is padded, as that of many real models is, to a size no multiple of 32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=270,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=EOS,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path
