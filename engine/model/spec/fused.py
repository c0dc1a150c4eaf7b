"""Projections that some families store as one: their names, and their parts' places in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lora_kernels.fp8 import Fp8Weight
from lora_kernels.quantized import Weight

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names of the parts of each fused projection, in the order of their outputs."""
WHOLE_OF = {part: whole for whole, parts in FUSED.items() for part in parts}
PART = re.compile(r"(?<![^.])(?:[qkv]|gate|up)_proj(?![^.])")


class Rows(NamedTuple):
    """The rows of the fused projection `whole` (its outputs), from `start` to before `stop`, that belong to one of its
    parts, such as `k_proj` of `qkv_proj`."""

    whole: str
    start: int
    stop: int


def fused_name(name: str) -> str:
    """Return the name of the fused projection, or its parameter, that the projection or parameter `name` is a part of:
    `qkv_proj` for `q_proj`. Other names are returned as they are."""
    return PART.sub(lambda found: WHOLE_OF[found[0]], name)


def fuse(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, ...]], dict[str, Rows]]:
    """Fuse the shapes of q, k and v, and of gate and up. Return the shape of each parameter as it is stored, and for
    each parameter of `shapes` its rows of a stored one, both by name."""
    whole: dict[str, tuple[int, ...]] = {}
    rows: dict[str, Rows] = {}
    for name, (outputs, *inputs) in shapes.items():
        stored = fused_name(name)
        start = whole[stored][0] if stored in whole else 0
        rows[name] = Rows(stored, start, start + outputs)
        whole[stored] = (start + outputs, *inputs)
    return whole, rows


def select_rows(weight: Weight, start: int, stop: int) -> Weight:
    """Return a copy of a weight's rows, its outputs, from `start` to before `stop`."""
    if isinstance(weight, Tensor):
        return weight[start:stop].clone()
    if isinstance(weight, Fp8Weight):
        numbers = weight.numbers.view(torch.uint8)[start:stop].clone().view(weight.numbers.dtype)
        return Fp8Weight(numbers, weight.scales[start:stop].clone())
    return weight.select(torch.arange(start, stop, device=weight.device))
