"""Makes a tokenizer of the transformers library encode as its folder's tokenizer.json says: transformers 5 builds many
anew from their vocabulary and drops normalizers or splitting, which the engine's grammars follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "tokenizer.json"
PARTS = ("normalizer", "pre_tokenizer", "decoder")
MODEL_FIELDS = ("byte_fallback", "fuse_unk", "unk_token", "ignore_merges", "continuing_subword_prefix")
"""Settings of a model (BPE and the like) that decide how it encodes, beside its vocabulary and merges."""
CHOSEN = ("add_prefix_space", "trim_offsets")
"""Fields in which the parts may differ, because tokenizer_config.json may choose them or nothing follows from them."""


def follow_file(hf_tokenizer: Any, folder: Path) -> None:
    """Give a fast tokenizer of transformers the model, normalizer, pre-tokenizer and decoder of the tokenizer.json in
    its folder, if any differs. Added tokens and the post-processor stay as tokenizer_config.json says."""
    from tokenizers import Tokenizer  # Imported here: transformers is, too.

    if not (folder / FILE).is_file():
        return
    backend, stored = hf_tokenizer.backend_tokenizer, Tokenizer.from_file(str(folder / FILE))
    if _encodes_alike(backend, stored):
        return
    backend.model = stored.model
    for part in PARTS:
        setattr(backend, part, getattr(stored, part))


def _encodes_alike(one: Any, other: Any) -> bool:
    if type(one.model) is not type(other.model):
        return False
    fields = [[getattr(model, field, None) for field in MODEL_FIELDS] for model in (one.model, other.model)]
    return fields[0] == fields[1] and all(_state(one, part) == _state(other, part) for part in PARTS)


def _state(backend: Any, part: str) -> Any:
    """Return what defines a part of a tokenizer, as JSON; None if there is no such part."""
    found = getattr(backend, part)
    return None if found is None else _without_chosen(json.loads(found.__getstate__()))


def _without_chosen(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_chosen(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_chosen(one) for key, one in value.items() if key not in CHOSEN}
    return value
