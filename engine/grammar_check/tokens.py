"""Reads a model's tokenizer for grammars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer


def read_tokens(file: Path, size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return the tokens of a `tokenizer.json` whose ids are below `size`, the number of columns of the model's logits.
    Raises ValueError if the file is damaged."""
    # The library refuses tokens beyond the columns, such as a padding token that was added to a tokenizer alone.
    text, eos = file.read_text(encoding="utf-8"), list(eos_token_ids)
    try:
        return LLTokenizer(text, n_vocab=size, eos_token=eos)
    except ValueError:  # too many tokens, or a damaged file, which is refused again
        return LLTokenizer(json.dumps(_cut(json.loads(text), size)), n_vocab=size, eos_token=eos)


def _cut(tokenizer: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the document of a tokenizer without the tokens whose ids are `size` or more."""
    added = [token for token in tokenizer.get("added_tokens", ()) if token["id"] < size]
    model = tokenizer["model"]
    if isinstance(model["vocab"], list):  # unigrams, whose places are their ids
        return tokenizer | {"added_tokens": added, "model": model | {"vocab": model["vocab"][:size]}}
    vocabulary = {text: number for text, number in model["vocab"].items() if number < size}
    kept: dict[str, Any] = {"vocab": vocabulary}
    if "merges" in model:
        kept["merges"] = [merge for merge in model["merges"] if _makes_token(merge, vocabulary)]
    return tokenizer | {"added_tokens": added, "model": model | kept}


def _makes_token(merge: str | list[str], vocabulary: dict[str, int]) -> bool:
    """Return whether a merge, two texts or both with a space between them, makes a token of the vocabulary."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in vocabulary and right in vocabulary and left + right in vocabulary
