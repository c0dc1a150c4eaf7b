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
from lora_kernels.dora import BaseScales
from lora_kernels.layout import LoraTable, ProjectionGroup
from lora_kernels.segments import SegmentPlan
from lora_kernels.select import prepare_scales

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
    """One step's adapters.

    Attributes:
        prepared: the backend's own; None when every row is the base model's.
        scales: what DoRA adapters do to base outputs; None when there are none.
    """

    backend: Backend
    prepared: Any
    scales: BaseScales | None = None

    def add(self, out: Tensor, x: Tensor, layer: int, group: ProjectionGroup) -> Tensor:
        """Scales `out`, the base model's output, where a row's adapter does, adds each row's delta, and returns it."""
        if self.scales is not None:
            self.scales.apply(out, layer, group)
        if self.prepared is not None:
            self.backend.add_lora(out, x, self.prepared, layer, group)
        return out


def prepare_lora(backend: Backend, arena: Tensor, table: LoraTable, segments: SegmentPlan) -> LoraStep:
    """Once a step. `arena` is flat, [num_elements]."""
    if not segments.num_segments:
        return LoraStep(backend, None)
    prepared = backend.prepare_lora(arena, table, segments)
    return LoraStep(backend, prepared, prepare_scales(arena, table, segments))
