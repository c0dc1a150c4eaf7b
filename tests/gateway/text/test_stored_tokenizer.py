"""Folders whose tokenizer.json differs from what transformers makes of the class that they name."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gateway.text.tokenizer import Tokenizer as OurTokenizer

SPECIAL = ("<unk>", "<s>", "</s>")
TEXTS = ("ab", " ab", "a b", "</s>ab", "</s> ab", "ab<s>bc", " <s>a", "  b", "a\nb", "é")


def saved(folder, backend, **settings):
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return backend


def pieces():
    """Return Llama 2's tokenizer, with a small vocabulary."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc", "▁a", "ab", "▁ab", "bc"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("b", "c")]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ends = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *ends])
    return backend


def byte_level():
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġa"]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "LlamaTokenizer", "legacy": True},
        {"tokenizer_class": "LlamaTokenizer", "legacy": False},
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
    ],
)
@pytest.mark.parametrize("make", [pieces, byte_level])
async def test_ids_and_texts_are_those_of_the_file(tmp_path, make, settings):
    stored = saved(tmp_path, make(), **settings)
    tokenizer = OurTokenizer.load(tmp_path)
    for text in TEXTS:
        assert await tokenizer.encode(text) == tuple(stored.encode(text).ids)
        ids = stored.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == stored.decode(ids)
