"""A JSON schema for section G, and a tokenizer with which an engine of random weights can follow it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from string import ascii_lowercase

from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.core.messages.grammar import Grammar, GrammarKind

CAN_FOLLOW = LLTokenizer is not None
"""True if llguidance is installed. Otherwise lean.py has put a stand-in in its place."""
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["chat", "batch", "priority"]},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "kind", "count", "tags"],
    "additionalProperties": False,
}
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": ITEM, "minItems": 500}))
"""Answers are longer than any that is timed, so that its request decodes until it is aborted."""
EOS = "<|end|>"
SPACE = "\u0120"
"""How byte-level tokenizers write a space."""


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer.json of `vocab_size` tokens, and a generation_config.json that names its EOS token.

    The tokens are EOS, printable ASCII, the other bytes, and random words of 2 to 8 letters, half of them after a
    space, as many as there is room for.
    """
    printable = [chr(code) for code in range(ord("!"), ord("~") + 1)] + [SPACE]
    other_bytes = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(printable))
    tokens = [EOS, *printable, *other_bytes][:vocab_size]
    tokens += islice(_words(set(tokens)), vocab_size - len(tokens))
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))


def _words(known: set[str]) -> Iterator[str]:
    """Yield random words without end, none twice and none that is `known`."""
    rng = Random(0)
    while True:
        word = rng.choice(("", SPACE)) + "".join(rng.choices(ascii_lowercase, k=rng.randint(2, 8)))
        if word not in known:
            known.add(word)
            yield word
