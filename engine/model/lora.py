"""Which projections an adapter can touch, and how their deltas join the base model's linears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.model.spec import ModelSpec
from lora_kernels.backend import Backend
from lora_kernels.layout import ProjectionGroup

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The T axis of every table: a projection's index is its target number."""


def target_widths(spec: ModelSpec) -> npt.NDArray[np.int32]:
    """int32 [targets, 2]: (in_features, out_features) of each projection."""
    hidden, query, kv, inner = spec.hidden_size, spec.query_width, spec.kv_width, spec.intermediate_size
    pairs = [(hidden, query), (hidden, kv), (hidden, kv), (query, hidden), (hidden, inner), (hidden, inner)]
    return np.asarray([*pairs, (inner, hidden)], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ProjectionGroups:
    """The four linears of a layer, as one call of the backend each sees them."""

    qkv: ProjectionGroup
    o: ProjectionGroup
    gate_up: ProjectionGroup
    down: ProjectionGroup


def projection_groups(spec: ModelSpec) -> ProjectionGroups:
    widths = target_widths(spec)

    def group(name: str, targets: Sequence[int]) -> ProjectionGroup:
        outs = tuple(int(widths[target, 1]) for target in targets)
        return ProjectionGroup(name, tuple(targets), int(widths[targets[0], 0]), outs)

    return ProjectionGroups(group("qkv", (0, 1, 2)), group("o", (3,)), group("gate_up", (4, 5)), group("down", (6,)))


@dataclass(frozen=True, slots=True)
class LoraStep:
    """One step's adapters. `prepared` is the backend's own; None when every row is the base model's."""

    backend: Backend
    prepared: Any

    def add(self, out: Tensor, x: Tensor, layer: int, group: ProjectionGroup) -> Tensor:
        """Adds each row's delta to `out` in place, and returns it."""
        if self.prepared is not None:
            self.backend.add_lora(out, x, self.prepared, layer, group)
        return out
