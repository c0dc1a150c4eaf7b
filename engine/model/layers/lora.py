"""Defines the projections that an adapter can change, and adds its deltas to the base model's linears."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.model.spec.config import ModelSpec
from engine.model.weights.reader import mlp_path
from lora_kernels.backend import Backend
from lora_kernels.dora import BaseScales
from lora_kernels.layout import EXPERT_TARGETS, LoraTable, ProjectionGroup
from lora_kernels.linear import Linear
from lora_kernels.pinned import upload
from lora_kernels.routing import Routing, RowAdapters
from lora_kernels.segments import SegmentPlan
from lora_kernels.select import prepare_scales

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections in the order of the T axis of every table: a projection's index is its target number. Those of the MLP
are of the one that computes all rows."""
NUM_ATTENTION = 4
"""Number of attention projections, which come first in TARGETS."""
SHARED_GATE = "shared_expert_gate"
ROUTERS = (SHARED_GATE, "gate")
"""Names of the linears that weigh experts for a row: the gate of the shared expert, which computes all rows, and the
router of the others. They follow TARGETS, and the gate, up and down projections of each expert follow them."""
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
NUMBER = re.compile(r"(?<=experts\.)\d+\.")
ROUTER = len(TARGETS) + 1
"""Target number of the router. All higher target numbers are those of experts' projections."""
FIRST_EXPERT = len(TARGETS) + len(ROUTERS)
"""Target number of the gate of expert 0. It is a multiple of three, as `ExpertKernels.prepare_lora` needs it."""


def target_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of all LoRA targets of a model, the projections (and routers) of a layer that adapters may
    change, by target number. The name of an expert's projection includes the expert's number: `experts.3.up_proj`."""
    if spec.experts is None:
        return TARGETS
    numbers = range(spec.experts.count)
    return (*TARGETS, *ROUTERS, *(f"experts.{number}.{name}" for number in numbers for name in EXPERT_PROJECTIONS))


def touched_names(names: Sequence[str], ranks: npt.NDArray[np.int32]) -> tuple[str, ...]:
    """Return the names of the projections that an adapter with these ranks, int32 [layers, targets], changes in any
    layer. A projection of experts is named once, without the expert's number. `names` are the model's
    `target_names`."""
    touched = (name for name, column in zip(names, ranks.T, strict=True) if column.any())
    return tuple(dict.fromkeys(NUMBER.sub("", name) for name in touched))


def dense_path(layer: int, target: int) -> str | None:
    """Return the path of projection `target` of a layer, in a model without experts:
    `model.layers.3.self_attn.q_proj`."""
    block = "self_attn" if target < NUM_ATTENTION else "mlp"
    return f"model.layers.{layer}.{block}.{TARGETS[target]}"


def target_path(spec: ModelSpec, names: Sequence[str], layer: int, target: int) -> str | None:
    """Return the path that checkpoints and adapters of a model have for a layer's LoRA target, given by its number.
    `names` are the model's `target_names`. None means that the layer lacks the target."""
    if target < NUM_ATTENTION:
        return dense_path(layer, target)
    if target < len(TARGETS):
        path = mlp_path(spec, layer) if spec.has_mlp(layer) else None
    else:
        path = "mlp" if spec.has_experts(layer) and (names[target] != SHARED_GATE or spec.shares_expert) else None
    return path and spec.stored_name(f"model.layers.{layer}.{path}.{names[target]}")


def target_widths(spec: ModelSpec) -> npt.NDArray[np.int32]:
    """Return (in_features, out_features) of each LoRA target of a model, int32 [targets, 2], in the order of
    `target_names`."""
    hidden, query, kv = spec.hidden_size, spec.query_width, spec.kv_width
    pairs = [(hidden, query), (hidden, kv), (hidden, kv), (query, hidden), *_mlp_widths(hidden, spec.intermediate_size)]
    if spec.experts is not None:
        pairs += [(hidden, 1), (hidden, spec.experts.count)]
        pairs += _mlp_widths(hidden, spec.experts.width) * spec.experts.count
    return np.asarray(pairs, dtype=np.int32)


def _mlp_widths(hidden: int, inner: int) -> list[tuple[int, int]]:
    return [(hidden, inner), (hidden, inner), (inner, hidden)]


@dataclass(frozen=True, slots=True)
class ProjectionGroups:
    """The linears of a layer (q, k, v and gate, up are fused), as groups of the projections that adapters change.
    `experts` are the groups of layers with experts, or None."""

    qkv: ProjectionGroup
    o: ProjectionGroup
    gate_up: ProjectionGroup
    down: ProjectionGroup
    experts: ExpertGroups | None


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """The linears of a layer with experts, as groups of the projections that adapters change. Each expert has virtual
    slots (lora_kernels/routing.py), under which its projections have the same target numbers."""

    router: ProjectionGroup
    shared_gate: ProjectionGroup
    gate_up: ProjectionGroup
    down: ProjectionGroup


def projection_groups(spec: ModelSpec) -> ProjectionGroups:
    widths = target_widths(spec)

    def group(name: str, targets: Sequence[int], first: int = 0) -> ProjectionGroup:
        outs = tuple(int(widths[first + target, 1]) for target in targets)
        return ProjectionGroup(name, tuple(targets), int(widths[first + targets[0], 0]), outs)

    experts = None
    if spec.experts is not None:
        shared_gate, router = group("shared_gate", (7,)), group("router", (8,))
        gate_up, down = group("expert_gate_up", (0, 1), FIRST_EXPERT), group("expert_down", (2,), FIRST_EXPERT)
        experts = ExpertGroups(router, shared_gate, gate_up, down)
    dense = group("qkv", (0, 1, 2)), group("o", (3,)), group("gate_up", (4, 5)), group("down", (6,))
    return ProjectionGroups(*dense, experts)


@dataclass(frozen=True, slots=True)
class LoraStep:
    """The LoRA work of one step, prepared once and applied to every linear that adapters may change."""

    backend: Backend
    prepared: Any
    """The backend's own data. None means that every row uses the base model."""
    scales: BaseScales | None = None
    """The scales that DoRA adapters apply to base outputs. None means that the step has no such adapters."""
    of_experts: LoraOfExperts | None = None
    """The work on experts. None means that no adapter of the step changes any."""

    def apply(self, base: Linear, x: Tensor, layer: int, group: ProjectionGroup) -> Tensor:
        """Compute a linear of the base model for `x` [num_rows, group.in_features], scale the rows that have DoRA
        adapters, and add each row's delta. Return a new tensor, [num_rows, sum(group.out_features)]."""
        out = base(x)
        if self.scales is not None:
            self.scales.apply(out, layer, group)
        if self.prepared is not None:
            self.backend.add_lora(out, x, self.prepared, layer, group)
        return out

    def route(
        self, logits: Tensor, top_k: int, normalised: bool, layer: int, groups: ExpertGroups
    ) -> tuple[Routing, LoraStep]:
        """Choose `top_k` experts for each row by the router's `logits`, [num_rows, experts]. Return the routing, and
        the LoRA work on its entries (a row at one of its experts), to be applied with `groups` and layer 0."""
        experts, work = self.backend.experts, self.of_experts
        if work is None:
            return experts.route(logits, top_k, normalised=normalised), LoraStep(self.backend, None)
        routing = experts.route(logits, top_k, normalised=normalised, order=work.adapters.order)
        features = max(groups.gate_up.in_features, groups.down.in_features)
        prepared = experts.prepare_lora(work.arena, work.table, work.adapters, routing, layer, FIRST_EXPERT, features)
        return routing, LoraStep(self.backend, prepared)


class LoraOfExperts(NamedTuple):
    """What all layers of a step need to prepare their LoRA work on experts. Each layer prepares it once its routing is
    known: see `ExpertKernels.prepare_lora`."""

    arena: Tensor
    table: LoraTable
    adapters: RowAdapters


def prepare_lora(backend: Backend, arena: Tensor, table: LoraTable, segments: SegmentPlan, num_rows: int) -> LoraStep:
    """Prepare the LoRA work of a step of `num_rows`, once for all layers. `arena` is flat, [num_elements]. If no row
    has an adapter, the result's `apply` adds nothing."""
    if not segments.num_segments:
        return LoraStep(backend, None)
    prepared = backend.prepare_lora(arena, table, segments)
    scales = prepare_scales(arena, table, segments)
    return LoraStep(backend, prepared, scales, _prepare_experts(arena, table, segments, num_rows))


def _prepare_experts(arena: Tensor, table: LoraTable, segments: SegmentPlan, num_rows: int) -> LoraOfExperts | None:
    slots, layers, targets = table.host_ranks.shape
    if targets <= FIRST_EXPERT:
        return None
    # The table keeps each expert's largest rank. With 48 layers of 128 experts and 64 adapters of a step, reading these
    # took 0.7 ms on a Zen 3 core, and reading all ranks 2.7 ms.
    ranks = table.by_expert().max_ranks.reshape(slots, layers, -1)
    max_rank = int(ranks[segments.adapter_slots, :, FIRST_EXPERT // EXPERT_TARGETS :].max())
    if not max_rank:
        return None
    of_rows, device = segments.slots_of_rows(num_rows), arena.device
    order, max_rows = np.argsort(of_rows, kind="stable"), int(segments.lengths.max())
    adapters = RowAdapters(upload(of_rows, device), upload(order, device), max_rank, max_rows)
    return LoraOfExperts(arena, table, adapters)
