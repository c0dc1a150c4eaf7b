"""Tokenizers of grammars that have more tokens than the model has rows."""

import json

import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.core.messages.grammar import Grammar, GrammarKind
from engine.grammar_check.source import library_source
from engine.grammar_check.tokens import read_tokens

WORDS = ["the cat sat on the mat", "a cat and a hat", "that cat"] * 3
SIZE, EOS = 270, 0


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


def unigrams():
    letters = [(letter, -5.0) for letter in "\u2581abcdefghijklmnopqrstuvwxyz"]
    pairs = [(first + second, -4.0) for first, _ in letters for second, _ in letters[:10]]
    tokenizer = Tokenizer(models.Unigram([("</s>", 0.0), ("<unk>", 0.0), *letters, *pairs], 1, byte_fallback=False))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def allowed(tokens, pattern):
    """Return the ids that a regular expression allows first."""
    matcher = LLMatcher(tokens, library_source(Grammar(GrammarKind.REGEX, pattern)), log_level=0)
    mask = allocate_token_bitmask(1, SIZE)
    fill_next_token_bitmask(matcher, mask)
    assert not matcher.is_error(), matcher.get_error()
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


@pytest.mark.parametrize("make", [byte_level, unigrams])
def test_tokens_without_rows_are_none_of_a_grammar(tmp_path, make):
    tokenizer = make()
    tokenizer.add_tokens([AddedToken("[PAD]", normalized=False), AddedToken("<|new|>", normalized=False)])
    assert tokenizer.get_vocab_size() > SIZE
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    ids = allowed(read_tokens(file, SIZE, [EOS]), "[a-z]{1,9}")
    texts = {tokenizer.id_to_token(int(number)) for number in ids}
    assert "c" in texts and max(ids) < SIZE
    assert all(text.isalpha() for text in texts)


def test_a_damaged_tokenizer_is_refused(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}))
    with pytest.raises(ValueError):
        read_tokens(file, SIZE, [EOS])
