"""Which experts compute which rows, in one layer of a mixture of experts. An *entry* is a row at one of its experts;
entries are sorted by expert. Adapters are looked up under *virtual slots*, see `LoraTable.by_expert`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lora_kernels.layout import EXPERT_TARGETS, LoraTable
from lora_kernels.segments import SegmentPlan, plan_segments


@dataclass(frozen=True, slots=True)
class Routing:
    """The entries of one layer, on the device."""

    rows: Tensor
    """int32 [num_rows * top_k]. Row of each entry."""
    starts: Tensor
    """int32 [experts + 1]. Entries of expert i are `starts[i]:starts[i + 1]`."""
    places: Tensor
    """int32 [num_rows, top_k]. Entries of each row, that of its likeliest expert first."""
    weights: Tensor
    """fp32 [num_rows, top_k]. Factor of each entry's result, in the order of `places`."""


class RowAdapters(NamedTuple):
    """The adapters of a step's rows, for experts."""

    slots: Tensor
    """int32 [num_rows], on the device. Adapter slot of each row, -1 for the base model."""
    order: Tensor
    """int64 [num_rows], on the device. All rows, those of the base model first and then by adapter slot."""
    max_rank: int
    """No adapter of the step has a larger rank on an expert."""
    max_rows: int
    """No adapter of the step has more rows."""


class ExpertKernels(Protocol):
    """The operations of a mixture of experts besides matrix products (see lora_kernels/grouped.py) and LoRA."""

    def route(self, logits: Tensor, top_k: int, *, normalised: bool, order: Tensor | None = None) -> Routing:
        """Choose the `top_k` experts of the largest logits [num_rows, experts] of each row, weighted by softmax in fp32
        over all or, if `normalised`, over the chosen. An expert's entries follow `order`, int64 [num_rows], by default
        ascending."""

    def gather(self, x: Tensor, routing: Routing) -> Tensor:
        """Return the row of `x` [num_rows, width] of each entry: a new tensor [num_entries, width]."""

    def combine(self, entries: Tensor, routing: Routing) -> Tensor:
        """Return for each row the sum of its entries [num_entries, width] times their weights, rounded to the entries'
        dtype, in fp32 and in the order of `routing.places`: a new tensor [num_rows, width]."""

    def prepare_lora(
        self,
        arena: Tensor,
        table: LoraTable,
        adapters: RowAdapters,
        routing: Routing,
        layer: int,
        first_target: int,
        max_features: int,
    ) -> Any:
        """Return the data with which `Backend.add_lora` adds the deltas of experts' adapters to entries, as layer 0 and
        targets 0 (gate), 1 (up) and 2 (down). None means that there is nothing to add.

        Args:
            first_target: the gate of expert 0 in `table`; a multiple of 3, as is the number of targets.
            routing: of this layer, made with `adapters.order`.
            max_features: the widest input of experts' projections.
        """


PrepareLora = Callable[[Tensor, LoraTable, SegmentPlan], Any]
"""See `Backend.prepare_lora`."""


class TorchExperts:
    """`ExpertKernels` in torch, for any device. `prepare` is the backend's `prepare_lora`. To segment entries by
    adapter, the host waits for the experts of all rows."""

    def __init__(self, prepare: PrepareLora) -> None:
        self._prepare = prepare

    def route(self, logits: Tensor, top_k: int, *, normalised: bool, order: Tensor | None = None) -> Routing:
        """Choose the experts of each row: `ExpertKernels.route`."""
        logits = logits.float()
        chosen, experts = logits.topk(top_k, dim=1)
        weights = chosen.softmax(1) if normalised else logits.softmax(1).gather(1, experts)
        rows = torch.arange(len(logits), device=logits.device) if order is None else order
        sorted_experts, of_entry = experts[rows].flatten().sort(stable=True)
        numbers = torch.arange(logits.shape[1] + 1, device=logits.device)
        starts = torch.searchsorted(sorted_experts, numbers, out_int32=True)
        places = torch.empty_like(of_entry).scatter_(0, of_entry, torch.arange(len(of_entry), device=logits.device))
        by_row = torch.empty_like(experts).index_copy_(0, rows, places.view(-1, top_k))
        return Routing(rows[of_entry // top_k].int(), starts, by_row.int(), weights)

    def gather(self, x: Tensor, routing: Routing) -> Tensor:
        """Return each entry's row of `x`: `ExpertKernels.gather`."""
        return x.index_select(0, routing.rows)

    def combine(self, entries: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of each row's entries: `ExpertKernels.combine`."""
        parts = entries[routing.places.long()].float()
        weights = routing.weights.to(entries.dtype).float()
        return torch.einsum("rkw,rk->rw", parts, weights).to(entries.dtype)

    def prepare_lora(
        self,
        arena: Tensor,
        table: LoraTable,
        adapters: RowAdapters,
        routing: Routing,
        layer: int,
        first_target: int,
        max_features: int,
    ) -> Any:
        """Segments the entries on the host, and prepares their LoRA as if they were rows:
        `ExpertKernels.prepare_lora`."""
        starts, rows = routing.starts.cpu().numpy(), routing.rows.cpu().numpy()
        experts = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        slots = adapters.slots.cpu().numpy()[rows]
        virtual = first_virtual_slot(table, layer, first_target) + slots * slots_each(table) + experts
        plan = plan_segments(np.where(slots < 0, -1, virtual).astype(np.int32))
        return self._prepare(arena, table.by_expert(), plan) if plan.num_segments else None


def first_virtual_slot(table: LoraTable, layer: int, first_target: int) -> int:
    """Return the virtual slot (in `LoraTable.by_expert`) of expert 0 of a layer for adapter slot 0. `first_target` is
    the target in `table` of that expert's gate."""
    return (layer * table.host_ranks.shape[2] + first_target) // EXPERT_TARGETS


def slots_each(table: LoraTable) -> int:
    """Return the number of virtual slots (in `LoraTable.by_expert`) that each adapter slot has."""
    _, layers, targets = table.host_ranks.shape
    return layers * targets // EXPERT_TARGETS
