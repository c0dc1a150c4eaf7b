"""Defines the projections that an adapter can change, and adds its deltas to the base model's linears."""

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
from lora_kernels.linear import Linear
from lora_kernels.segments import SegmentPlan
from lora_kernels.select import prepare_scales

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections in the order of the T axis of every table: a projection's index is its target number."""


def target_widths(spec: ModelSpec) -> npt.NDArray[np.int32]:
    """Returns int32 [targets, 2]: (in_features, out_features) of each projection in TARGETS."""
    hidden, query, kv, inner = spec.hidden_size, spec.query_width, spec.kv_width, spec.intermediate_size
    pairs = [(hidden, query), (hidden, kv), (hidden, kv), (query, hidden), (hidden, inner), (hidden, inner)]
    return np.asarray([*pairs, (inner, hidden)], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ProjectionGroups:
    """The four linears of a layer (q, k, v and gate, up are fused), as groups of the projections that adapters change.
    The backend adds a group's deltas in one call."""

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
    """The LoRA work of one step.

    Attributes:
        prepared: the backend's own data. None means that every row uses the base model.
        scales: the scales that DoRA adapters apply to base outputs. None means that the step has no such adapters.
    """

    backend: Backend
    prepared: Any
    scales: BaseScales | None = None

    def apply(self, base: Linear, x: Tensor, layer: int, group: ProjectionGroup) -> Tensor:
        """Computes a linear of the base model, scales the rows that have DoRA adapters, then adds each row's delta.

        Args:
            base: the base model's linear of the group.
            x: [num_rows, group.in_features], the input of the linear.

        Returns:
            A new tensor, [num_rows, sum(group.out_features)].
        """
        out = base(x)
        if self.scales is not None:
            self.scales.apply(out, layer, group)
        if self.prepared is not None:
            self.backend.add_lora(out, x, self.prepared, layer, group)
        return out


def prepare_lora(backend: Backend, arena: Tensor, table: LoraTable, segments: SegmentPlan) -> LoraStep:
    """Prepares the LoRA work of a step, once for all layers. `arena` is flat, [num_elements]. If no row has an adapter,
    the result's `apply` adds nothing."""
    if not segments.num_segments:
        return LoraStep(backend, None)
    prepared = backend.prepare_lora(arena, table, segments)
    return LoraStep(backend, prepared, prepare_scales(arena, table, segments))
