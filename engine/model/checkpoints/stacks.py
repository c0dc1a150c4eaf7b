"""Reads the parameters of single experts from stacked tensors of a layer's experts, perhaps in MXFP4 (OCP Microscaling
Formats 1.0, 2023): codes of 4 bits, of which blocks of 32 share a power of two."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.checkpoints.layers import Layer
from engine.model.checkpoints.stored import FLOATS, Shape, StoredTensors, WeightsError
from lora_kernels.quantized import unpack_halves

MXFP4 = "mxfp4"
"""The `quant_method` in config.json of checkpoints in MXFP4."""

# gpt-oss stores `name_blocks`, uint8 [experts, out_features, in_features / 32, 16], the first of two codes (E2M1) in
# the lower half of a byte, and `name_scales` (E8M0), uint8 [experts, out_features, in_features / 32].

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*MAGNITUDES, *(-number for number in MAGNITUDES)], dtype=torch.bfloat16)
"""The number that each 4-bit code stands for."""
BIAS, NAN = 127, 255
"""Bias of the exponents of scales (E8M0), and the scale that stands for NaN."""
LARGEST = 252
"""The largest stored exponent of a scale with which the products of all codes fit into bf16."""


class Part(NamedTuple):
    """The part of a stacked tensor that is a parameter of one expert."""

    stored: str
    """Name of the tensor."""
    shape: Shape
    """[experts, out_features, in_features] of the tensor, or [experts, out_features] of biases."""
    transposed: bool
    """True means that the tensor is stored as [experts, in_features, out_features]."""
    number: int
    """Index of the expert."""
    rows: slice
    """Range of the expert's outputs in the tensor that are outputs of the parameter."""


def find_stacked(stored: StoredTensors, parts: Mapping[str, Part], method: str) -> dict[str, Layer]:
    """Return how each parameter of an expert is read from a stacked tensor, by name. `method` is the quantisation in
    config.json, or empty. Raises WeightsError, which names a tensor, if one is missing or does not fit."""
    return {name: _find(stored, part, method) for name, part in parts.items()}


def _find(stored: StoredTensors, part: Part, method: str) -> Layer:
    if method == MXFP4 and len(part.shape) == 3 and part.stored not in stored:
        blocks, scales = f"{part.stored}_blocks", f"{part.stored}_scales"
        count, outputs, inputs = part.shape
        stored.require(blocks, ("U8",), (count, outputs, inputs // BLOCK, BLOCK // 2))
        stored.require(scales, ("U8",), (count, outputs, inputs // BLOCK))
        return Layer(MXFP4, {blocks, scales}, None, partial(_read_mxfp4, stored, part, blocks, scales))
    count, *matrix = part.shape
    stored.require(part.stored, FLOATS, (count, *(reversed(matrix) if part.transposed else matrix)))
    return Layer("", {part.stored}, None, partial(_read, stored, part))


def _read(stored: StoredTensors, part: Part) -> Tensor:
    one = stored.read_one(part.stored, part.number)
    return (one.T if part.transposed and one.dim() == 2 else one)[part.rows].contiguous()


def _read_mxfp4(stored: StoredTensors, part: Part, blocks: str, scales: str) -> Tensor:
    """Read one expert's MXFP4 weight in bf16, which holds every product of a code and a scale exactly, unless it is
    2^128 or more. Raises WeightsError for such a product, and for a scale that is not a number."""
    exponents = stored.read_one(scales, part.number)[part.rows]
    if (exponents == NAN).any():
        raise WeightsError(f"tensor {scales} has scales that are not numbers")
    codes = stored.read_one(blocks, part.number)[part.rows]
    numbers = E2M1.index_select(0, unpack_halves(codes.flatten(0, 1)).flatten().int()).view(*exponents.shape, BLOCK)
    weight = torch.ldexp(numbers, (exponents.int() - BIAS)[..., None]).to(torch.bfloat16).flatten(1)
    if (exponents > LARGEST).any() and not weight.isfinite().all():
        raise WeightsError(f"tensor {scales} has scales with which weights are 2^128 or more, beyond bf16")
    return weight
