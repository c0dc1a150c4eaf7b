"""Finds the tensors of single experts in the stacked ones of GGUF files. Files of 2023 have a tensor for each expert,
`blk.N.ffn_gate.E.weight`; later ones have those of a layer in one, `blk.N.ffn_gate_exps.weight`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from engine.model.gguf.blocks import BLOCK_TYPES
from engine.model.gguf.header import StoredTensor

STACKED = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.weight")
MOST_EXPERTS = 1024
"""Maximum number of experts of a layer. The largest published models have 512."""
FLOAT_BYTES = {0: 4, 1: 2, 30: 2}
"""Bytes of a number of the types that are not quantised, by their numbers in ggml: F32, F16 and BF16."""


def unstacked(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a file, with those of each expert in place of stacked ones."""
    found: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        stack = STACKED.fullmatch(name)
        if stack and len(stored.shape) == 3:
            found |= {f"{stack[1]}.{number}.weight": one for number, one in enumerate(_slices(stored))}
        else:
            found[name] = stored
    return found


def _slices(stored: StoredTensor) -> Iterator[StoredTensor]:
    count, outputs, inputs = stored.shape
    if count > MOST_EXPERTS:
        raise ValueError(f"a tensor has {count} experts, and may have {MOST_EXPERTS}")
    size = outputs * row_bytes(stored.kind, inputs)
    return (stored._replace(shape=(outputs, inputs), place=stored.place + number * size) for number in range(count))


def row_bytes(kind: int, inputs: int) -> int:
    """Return the bytes that a row of `inputs` numbers takes in a type of ggml. Raises ValueError if there is no such
    type."""
    if kind in FLOAT_BYTES:
        return FLOAT_BYTES[kind] * inputs
    if kind in BLOCK_TYPES:
        return inputs // BLOCK_TYPES[kind].inputs * BLOCK_TYPES[kind].num_bytes
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # takes a second, and is needed rarely

    if kind not in set(GGMLQuantizationType):
        raise ValueError(f"a tensor is of type {kind} of ggml, which cannot be read")
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return inputs // numbers * size
