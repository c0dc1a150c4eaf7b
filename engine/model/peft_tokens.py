"""Trained tokens of an adapter (PEFT's `trainable_token_indices`): rows of the embedding and of the head that it has in
place of the base model's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.model.peft_config import EMBEDDING, HEAD
from engine.model.peft_settings import AdapterError
from engine.process.adapter_files import WEIGHTS_FILE
from lora_kernels.layout import TokenIds

KEY = re.compile(
    rf"base_model\.model\.(?:model\.)?(?P<layer>{EMBEDDING}|{HEAD})\.token_adapter\.trainable_tokens_delta(?:\.[^.]+)?"
)


class Ends(NamedTuple):
    """The shape of a model's embedding and head, each [vocab_size, hidden_size], and whether they are the same."""

    vocab_size: int
    hidden_size: int
    are_tied: bool


NO_ENDS = Ends(0, 0, False)


class TrainedRows(NamedTuple):
    """The rows of trained tokens, fp32 [ids.num_rows, hidden_size]."""

    ids: TokenIds
    rows: Tensor


def split_tokens(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tensors of trained tokens, by layer, and the others, by name. Raises AdapterError if a layer has
    several."""
    found: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        if match is None:
            others[key] = tensor
        elif match["layer"] in found:
            raise AdapterError(f"{WEIGHTS_FILE} holds more than one adapter ({key[:200]!r})")
        else:
            found[match["layer"]] = tensor
    return found, others


def stored_layers(tokens: tuple[tuple[str, tuple[int, ...]], ...], ends: Ends) -> dict[str, tuple[int, ...]]:
    """Returns the layers whose rows the file has, with their tokens (see `PeftSettings.tokens`): not the head if it is
    tied and has the embedding's tokens, because PEFT then gives it the embedding's rows."""
    layers = dict(tokens)
    if ends.are_tied and layers.get(HEAD) == layers.get(EMBEDDING):
        layers.pop(HEAD, None)
    return layers


def arrange_rows(layers: Mapping[str, tuple[int, ...]], rows: Mapping[str, Tensor], ends: Ends) -> TrainedRows:
    """Returns the rows in the order of their tokens, the embedding's before the head's. A tied head without rows of its
    own has the embedding's. Raises AdapterError if a token is beyond the vocabulary.

    Args:
        layers: result of `stored_layers`.
        rows: layer -> its rows, fp32 [tokens of the layer, hidden_size].
    """
    ids, parts = {EMBEDDING: np.empty(0, np.int64), HEAD: np.empty(0, np.int64)}, []
    for layer, given in sorted(layers.items()):  # EMBEDDING sorts before HEAD
        if max(given) >= ends.vocab_size:
            raise AdapterError(
                f"trainable_token_indices has {max(given)}, and the model's tokens end at {ends.vocab_size - 1}: serve "
                "the base model whose embedding was resized, or retrain on tokens that it has"
            )
        order = np.argsort(given)
        ids[layer] = np.asarray(given, np.int64)[order]
        parts.append(rows[layer][torch.from_numpy(order)])
    if ends.are_tied and not len(ids[HEAD]):
        ids[HEAD] = ids[EMBEDDING]
    both = torch.cat(parts)
    return TrainedRows(TokenIds(ids[EMBEDDING], ids[HEAD], len(both), ends.hidden_size), both)
