"""Reads what the folder of a draft model says, and refuses a model that cannot guess for the large one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.model.spec.config import ModelSpec, read_spec

TOKENIZER = "tokenizer.json"
ALIGNED_BLOCK = 16
"""A page with room for at least this many tokens of the draft model's KV holds a multiple of this number."""


class DraftFolder(NamedTuple):
    """The draft model of speculative decoding before it is loaded: the engine configuration with which it is loaded,
    and its shape."""

    config: EngineConfig
    spec: ModelSpec


def find_draft(config: EngineConfig, spec: ModelSpec, device: torch.device) -> DraftFolder | None:
    """Return the draft model that the configuration names, or None. Raises ValueError if it cannot be read, has another
    vocabulary than `spec`, or the device is a GPU, whose steps are planned ahead."""
    draft = config.draft_config
    if draft is None:
        return None
    if device.type != "cpu":
        raise ValueError(f"engine.speculation.draft_model is for a CPU, not for {device.type}: remove it")
    folder = Path(draft.model)
    try:
        found = read_spec(folder)
    except ValueError as error:
        raise ValueError(f"engine.speculation.draft_model: {error}") from error
    _check_vocabulary(folder, found, Path(config.model), spec)
    return DraftFolder(draft, found.served(config.max_model_len or found.max_position))


def _check_vocabulary(folder: Path, draft: ModelSpec, model: Path, spec: ModelSpec) -> None:
    """Raises ValueError unless the draft model and the large model have the same tokens. If one of them has no
    tokenizer.json, only the sizes of their vocabularies are compared."""
    if (folder / TOKENIZER).is_file() and (model / TOKENIZER).is_file():
        ours, theirs = (Tokenizer.from_file(str(each / TOKENIZER)).get_vocab() for each in (model, folder))
        if ours == theirs:
            return
        token = min(ours.items() ^ theirs.items(), key=lambda pair: pair[1])[0]
        reason = f"for example in {token!r}: number {theirs.get(token)} in place of {ours.get(token)}"
    elif draft.vocab_size == spec.vocab_size:
        return
    else:
        reason = f"which has {draft.vocab_size} tokens in place of {spec.vocab_size}"
    raise ValueError(f"engine.speculation.draft_model {folder} has not the vocabulary of the model, {reason}")


def draft_block(spec: ModelSpec, page_elements: int) -> int:
    """Return how many tokens of a draft model's KV a page of `page_elements` numbers holds, rounded down to a multiple
    of 16 if it holds 16 or more. Raises ValueError if it holds none."""
    of_token = 2 * spec.layers * spec.kv_heads * spec.head_dim
    block = page_elements // of_token
    if not block:
        raise ValueError(
            f"engine.speculation.draft_model has {of_token} numbers of KV a token, and a page has room for "
            f"{page_elements}: choose a smaller draft model or raise engine.block_size"
        )
    return block if block < ALIGNED_BLOCK else block // ALIGNED_BLOCK * ALIGNED_BLOCK
