"""Tensors that hold a projection, or several, of all experts of a layer, of which each expert's are read alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from torch import Tensor

from engine.model.checkpoints.layers import Layer
from engine.model.checkpoints.stored import FLOATS, Shape, StoredTensors


class Part(NamedTuple):
    """The part of a stacked tensor that is a parameter of one expert: `rows` of what the tensor `stored`, which has the
    shape `whole`, has at index `number` of its first axis."""

    stored: str
    whole: Shape
    number: int
    rows: slice


def find_stacked(stored: StoredTensors, parts: Mapping[str, Part]) -> dict[str, Layer]:
    """Returns the experts' parameters, by name. Raises WeightsError, which names a tensor, if a stacked one is missing
    or has another shape or dtype."""
    return {name: _find(stored, part) for name, part in parts.items()}


def _find(stored: StoredTensors, part: Part) -> Layer:
    stored.require(part.stored, FLOATS, part.whole)
    return Layer("", {part.stored}, None, partial(_read, stored, part))


def _read(stored: StoredTensors, part: Part) -> Tensor:
    return stored.read_one(part.stored, part.number)[part.rows].contiguous()
