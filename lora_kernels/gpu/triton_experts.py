"""Routing, combination and LoRA of experts on a GPU: `ExpertKernels` in Triton. The host never waits."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from lora_kernels.gpu import triton_expert_tiles
from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_lora_plan import TritonLora
from lora_kernels.gpu.triton_lora_tuning import LoraTuning
from lora_kernels.gpu.triton_routing import choose_experts_kernel, combine_kernel, place_entries_kernel
from lora_kernels.layout import LoraTable
from lora_kernels.routing import Routing, RowAdapters, first_virtual_slot

ROWS = 4
"""Rows whose experts a program chooses, one for each of its warps."""
PLACE_BLOCK, COMBINE_BLOCK = 1024, 512
"""Entries that `place_entries_kernel` reads at a time, and columns that a program of `combine_kernel` adds up."""


class TritonExperts:
    """`ExpertKernels` for CUDA tensors."""

    def __init__(self, lora_tuning: LoraTuning) -> None:
        self._lora_tuning = lora_tuning

    def route(self, logits: Tensor, top_k: int, *, normalised: bool, order: Tensor | None = None) -> Routing:
        """Choose the experts of each row, in three launches at most: `ExpertKernels.route`."""
        rows, count = logits.shape
        numbers: dict[str, Any] = {"dtype": torch.int32, "device": logits.device}
        experts, weights = torch.empty(rows, top_k, **numbers), logits.new_empty(rows, top_k, dtype=torch.float32)
        entry_rows, places = torch.empty(rows * top_k, **numbers), torch.empty(rows, top_k, **numbers)
        starts = torch.empty(count + 1, **numbers)
        block, chosen = triton.next_power_of_2(count), triton.next_power_of_2(top_k)
        sizes = {"EXPERTS": count, "TOP_K": top_k, "BLOCK": block, "CHOSEN": chosen}
        choose = with_constants(choose_experts_kernel, NORMALISED=normalised, ROWS=ROWS, **sizes, num_warps=ROWS)
        choose((-(-rows // ROWS),), logits, experts, weights, rows, logits.stride(0))
        constants = {"TOP_K": top_k, "HAS_ORDER": order is not None, "BLOCK": PLACE_BLOCK}
        place = with_constants(place_entries_kernel, **constants, num_warps=4)
        order = experts if order is None else order
        place((count,), experts, order, entry_rows, places, starts, rows * top_k)
        return Routing(entry_rows, starts, places, weights)

    def gather(self, x: Tensor, routing: Routing) -> Tensor:
        """Return each entry's row of `x`: `ExpertKernels.gather`."""
        return x.index_select(0, routing.rows)

    def combine(self, entries: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of each row's entries: `ExpertKernels.combine`."""
        (rows, top_k), width = routing.places.shape, entries.shape[1]
        out = entries.new_empty(rows, width)
        kernel = with_constants(combine_kernel, TOP_K=top_k, BLOCK=COMBINE_BLOCK, num_warps=4)
        grid = rows, -(-width // COMBINE_BLOCK)
        kernel(grid, entries, routing.places, routing.weights, out, width, entries.stride(0))
        return out

    def prepare_lora(
        self,
        arena: Tensor,
        table: LoraTable,
        adapters: RowAdapters,
        routing: Routing,
        layer: int,
        first_target: int,
        max_features: int,
    ) -> TritonLora | None:
        """Segments the entries by adapter: `ExpertKernels.prepare_lora`."""
        if not adapters.max_rank or not len(routing.rows):
            return None
        virtual = first_virtual_slot(table, layer, first_target)
        return triton_expert_tiles.prepare(arena, table, adapters, routing, virtual, max_features, self._lora_tuning)
