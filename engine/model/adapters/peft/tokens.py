"""Trained tokens of an adapter: rows of the embedding and of the head that replace the base model's, named by PEFT's
`trainable_token_indices`, or the changed rows of layers in `modules_to_save`."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.model.adapters.peft.config import EMBEDDING, HEAD, MAX_TRAINED_TOKENS
from engine.model.adapters.peft.dora import BaseLinears, fp32
from engine.model.adapters.peft.settings import AdapterError, PeftSettings
from engine.process.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from lora_kernels.quantized import QuantizedWeight, Weight, dense
from lora_kernels.token_rows import TokenIds

KEY = re.compile(
    rf"base_model\.model\.(?:model\.)?(?P<layer>{EMBEDDING}|{HEAD})\."
    r"(?:token_adapter\.(?P<part>trainable_tokens_delta)(?:\.[^.]+)?|(?:modules_to_save\.[^.]+\.)?weight)"
)
PATHS = {EMBEDDING: "model.embed_tokens", HEAD: "lm_head"}
STORED = {"F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights files to which the base model's rows are rounded before they are compared with the file's."""
MOST_ROUNDED = 0.7
"""Root mean square of the differences between a row and its quantised form, in steps of the codes, up to which they
are those of quantising. ggml's quantisers make 0.25 to 0.31, and up to 0.67 in rows of a few very large weights."""
MOST_CHANGED = 256
"""Maximum number of layers whose changed tokens are remembered."""
SLICE_ROWS = 4096
"""Rows of a whole matrix that are converted and compared at the same time."""
Raw = Mapping[str, Any]
"""A tensor as it is stored in the file: dtype name, shape, data."""
Convert = Callable[[Raw, str, tuple[int, ...]], Tensor]
"""Function (tensor, its name in error messages, expected shape) -> fp32 tensor. Raises AdapterError if the tensor does
not have that shape."""


class Ends(NamedTuple):
    """The shape of a model's embedding and head, each [vocab_size, hidden_size], and whether they are tied."""

    vocab_size: int
    hidden_size: int
    are_tied: bool


NO_ENDS = Ends(0, 0, False)


class TrainedRows(NamedTuple):
    """The rows of the embedding and the head that an adapter has in place of the base model's: the tokens, and fp32
    [ids.num_rows, hidden_size]."""

    ids: TokenIds
    rows: Tensor


class ChangedTokens:
    """Cache of the tokens of which adapters have other rows of the embedding or the head than the base model, by
    adapter hash and layer, of the latest `MOST_CHANGED`. Thread-safe."""

    # Finding them takes reading the whole embedding: 1.2 GB in fp32 of Qwen3-30B-A3B.
    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[int, ...]] = OrderedDict()
        self._lock = Lock()

    def get(self, adapter_hash: str, layer: str) -> tuple[int, ...] | None:
        """Return the cached tokens of which the adapter has other rows of `layer`, the embedding or the head, than the
        base model. None means that they are not known yet."""
        with self._lock:
            return self._known.get((adapter_hash, layer))

    def put(self, adapter_hash: str, layer: str, ids: tuple[int, ...]) -> None:
        with self._lock:
            self._known[adapter_hash, layer] = ids
            while len(self._known) > MOST_CHANGED:
                self._known.popitem(last=False)


class KnownRows(NamedTuple):
    """What `_read_saved` needs to compare an adapter's saved layers with the base model's: `linears` reads the base
    model's layers, and `changed` remembers the results by `adapter_hash`, so that each content is compared once."""

    linears: BaseLinears
    changed: ChangedTokens
    adapter_hash: str


def split_stored(tensors: Mapping[str, Raw], settings: PeftSettings) -> tuple[dict[str, Raw], dict[str, Raw]]:
    """Separate whole layers, embedding or head, that the file has although the configuration does not say that they
    were trained, as PEFT's `save_embedding_layers` stores them. Return these by layer, and all other tensors by
    name."""
    stored: dict[str, Raw] = {}
    others: dict[str, Raw] = {}
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        if match and match["part"] is None and match["layer"] not in (*settings.saved, *stored):
            stored[match["layer"]] = tensor
        else:
            others[key] = tensor
    return stored, others


def refuse_changed(stored: Mapping[str, Raw], ends: Ends, base: KnownRows, convert: Convert) -> None:
    """Raises AdapterError if a layer that PEFT stored untrained differs from the base model's: some of its rows were
    trained after all, or its vocabulary was resized."""
    for layer, raw in stored.items():
        path = PATHS[EMBEDDING if ends.are_tied else layer]
        if changed := _read_saved(raw, layer, path, base, convert)[0]:
            raise AdapterError(
                f"{WEIGHTS_FILE} has {layer} whole, of which {len(changed)} rows differ from the base model's, token "
                f"{changed[0]} for one, and {CONFIG_FILE} does not say that they were trained: add {layer!r} to its "
                "modules_to_save, or save the adapter without save_embedding_layers"
            )


def split_tokens(tensors: Mapping[str, Raw], settings: PeftSettings) -> tuple[dict[str, Raw], dict[str, Raw]]:
    """Separate an adapter's tensors: return those of trained tokens and saved layers that the configuration announces,
    by layer, and all others, by name. Raises AdapterError if a layer has several."""
    found: dict[str, Raw] = {}
    others: dict[str, Raw] = {}
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        if match is None or (match["part"] is None) != (match["layer"] in settings.saved):
            others[key] = tensor
        elif match["layer"] in found:
            raise AdapterError(f"{WEIGHTS_FILE} holds more than one adapter ({key[:200]!r})")
        else:
            found[match["layer"]] = tensor
    return found, others


def read_rows(
    found: Mapping[str, Raw], settings: PeftSettings, ends: Ends, base: KnownRows, convert: Convert
) -> TrainedRows | None:
    """Return the rows of the embedding and the head that replace the base model's, or None. Raises AdapterError if they
    are not those of the configuration, not of the model's shape, or too many."""
    if ends.are_tied and settings.tokens and settings.saved:
        raise AdapterError(
            "modules_to_save and trainable_token_indices: the model's head is its embedding, which would have rows of "
            "both; retrain with trainable_token_indices only"
        )
    layers = stored_layers(settings.tokens, ends)
    if found.keys() != layers.keys() | set(settings.saved):
        raise AdapterError(
            f"{WEIGHTS_FILE} has trained rows of {sorted(found)}, and {CONFIG_FILE} says that they are of "
            f"{sorted(layers.keys() | set(settings.saved))}; save the adapter again"
        )
    rows = {
        layer: convert(found[layer], f"{layer}'s trainable_tokens_delta", (len(ids), ends.hidden_size))
        for layer, ids in layers.items()
    }
    for layer in settings.saved:
        path = PATHS[EMBEDDING if ends.are_tied else layer]
        layers[layer], rows[layer] = _read_saved(found[layer], layer, path, base, convert)
    layers = {layer: ids for layer, ids in layers.items() if ids}
    return arrange_rows(layers, rows, ends, ties=not settings.saved) if layers else None


def _read_saved(raw: Raw, layer: str, path: str, base: KnownRows, convert: Convert) -> tuple[tuple[int, ...], Tensor]:
    """Return what `_changed_rows` returns for a saved layer. Reads the base model's layer, which is at `path`, only if
    the changed tokens are not known yet."""
    known = base.changed.get(base.adapter_hash, layer)
    if known is not None:
        empty = torch.empty(0, int(raw["shape"][1]))
        return known, torch.cat([empty, *(_slice(raw, token, 1, layer, convert) for token in known)])
    found = _changed_rows(raw, layer, base.linears(path)[0], convert)
    base.changed.put(base.adapter_hash, layer, found[0])
    return found


def _changed_rows(raw: Raw, layer: str, base: Weight, convert: Convert) -> tuple[tuple[int, ...], Tensor]:
    """Return the tokens of which a saved layer has other rows than `base` [vocab_size, hidden_size], beyond the file's
    rounding and the base's quantisation, and these rows. Raises AdapterError if they are more than
    MAX_TRAINED_TOKENS."""
    if list(raw["shape"]) != list(base.shape):
        raise AdapterError(
            f"{layer} is {list(raw['shape'])}, and the model's is {list(base.shape)}: serve the base model whose "
            "embedding was resized, or retrain without modules_to_save"
        )
    base = base if isinstance(base, QuantizedWeight) else dense(base)
    ids, rows, count = [], [], 0
    for first in range(0, base.shape[0], SLICE_ROWS):
        saved = _slice(raw, first, min(SLICE_ROWS, base.shape[0] - first), layer, convert)
        changed = _differ(saved, base, first, STORED.get(raw["dtype"])).nonzero()[:, 0]
        count += len(changed)
        if count <= MAX_TRAINED_TOKENS:
            ids += (changed + first).tolist()
            rows.append(saved[changed])
    if count > MAX_TRAINED_TOKENS:
        size = count * base.shape[1] * 2 / 2**20
        raise AdapterError(
            f"modules_to_save: {count} of {base.shape[0]} rows of {layer} differ from the base model's, {size:.0f} MiB "
            f"in 16 bits for this adapter alone, and up to {MAX_TRAINED_TOKENS} rows are supported; retrain with "
            "trainable_token_indices in its place"
        )
    return tuple(ids), torch.cat(rows)


def _differ(saved: Tensor, base: Tensor | QuantizedWeight, first: int, stored: torch.dtype | None) -> Tensor:
    """Return which of the rows `saved`, fp32 [rows, hidden_size], differ from those of `base` from row `first` on, bool
    [rows], beyond what quantising, or rounding to the file's dtype `stored`, explains."""
    if isinstance(base, QuantizedWeight):
        own = base.select(torch.arange(first, first + len(saved), device=base.device)).to(torch.device("cpu"))
        steps = own.steps().clamp_(min=torch.finfo(torch.float32).tiny)
        return ((saved - own.dequantize()) / steps).square().mean(dim=1).sqrt() > MOST_ROUNDED
    own_rows = fp32(base[first : first + len(saved)])
    return (saved != (own_rows if stored is None else own_rows.to(stored).float())).any(dim=1)


def _slice(raw: Raw, first: int, count: int, layer: str, convert: Convert) -> Tensor:
    """Return `count` rows of a saved layer (the whole embedding or head in an adapter's file) from row `first` on, fp32
    [count, hidden_size]."""
    width = int(raw["shape"][1])
    row_bytes = len(raw["data"]) // int(raw["shape"][0])
    data = memoryview(raw["data"])[first * row_bytes : (first + count) * row_bytes]
    return convert({**raw, "shape": [count, width], "data": data}, f"the saved {layer}", (count, width))


def stored_layers(tokens: tuple[tuple[str, tuple[int, ...]], ...], ends: Ends) -> dict[str, tuple[int, ...]]:
    """Return the layers, embedding or head, whose trained rows the adapter's file has, with their tokens. A tied head
    with the embedding's tokens is left out, because PEFT gives it the embedding's rows."""
    layers = dict(tokens)
    if ends.are_tied and layers.get(HEAD) == layers.get(EMBEDDING):
        layers.pop(HEAD, None)
    return layers


def arrange_rows(
    layers: Mapping[str, tuple[int, ...]], rows: Mapping[str, Tensor], ends: Ends, ties: bool = True
) -> TrainedRows:
    """Return the rows in the order of their tokens, the embedding's before the head's. With `ties`, a tied head without
    rows of its own has the embedding's. Raises AdapterError if a token is beyond the vocabulary.

    Args:
        layers: layer -> its tokens, from `stored_layers` or changed ones.
        rows: layer -> its rows, fp32.
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
    if ties and ends.are_tied and not len(ids[HEAD]):
        ids[HEAD] = ids[EMBEDDING]
    both = torch.cat(parts)
    return TrainedRows(TokenIds(ids[EMBEDDING], ids[HEAD], len(both), ends.hidden_size), both)
