"""Routing, combination and LoRA of experts in numba, for CPU tensors."""

from __future__ import annotations

import ctypes
import math
from functools import cache

import numpy as np
import torch
from numba import carray, float32, njit
from torch import Tensor

from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import FORMATS, Format, load_as, rounded, size_of, store_as
from lora_kernels.cpu.kernel_cache import cached
from lora_kernels.cpu.numba_lora import GroupMemory, NumbaLora
from lora_kernels.cpu.openmp import ITEM, TICKETS, Kernel, Team
from lora_kernels.cpu.products import MAX_ROWS
from lora_kernels.cpu.simd import LANES
from lora_kernels.layout import EXPERT_TARGETS, LoraTable, ProjectionGroup
from lora_kernels.routing import Routing, RowAdapters


class CombineBlock(ctypes.Structure):
    """Argument block of the weighted sum of entries: addresses. `places` is int32 and `weights` fp32 [rows, top_k]."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("rows", "top_k", "places", "weights", "entries", "out", "width")),
    ]


@cache
def _combine_kernel(fmt: Format) -> Kernel:
    """Returns the kernel that adds up entries in `fmt`, compiled on first use."""

    def combine(pointer):
        block = carray(pointer, 1)[0]
        row = simd.take_ticket(pointer, ITEM)
        while row < block.rows:
            _combine_row(fmt, block, row)
            row = simd.take_ticket(pointer, ITEM)

    return Kernel(combine, CombineBlock)


@njit
def _combine_row(fmt, block, row):
    size, of_row = size_of(fmt), 4 * row * block.top_k
    for i in range(0, block.width, LANES):
        left, total = block.width - i, simd.splat(float32(0))
        for k in range(0, 4 * block.top_k, 4):
            place = simd.read_i32(block.places + of_row + k)
            weight = rounded(fmt, simd.splat(simd.read_f32(block.weights + of_row + k)))
            part = load_as(fmt, block.entries + (place * block.width + i) * size, left)
            total = simd.fma(weight, part, total)
        store_as(fmt, block.out + (row * block.width + i) * size, total, left)


class NumbaExperts:
    """`ExpertKernels` for CPU tensors. A `Team` of threads runs kernels in parallel; they are compiled on first use."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._memories: dict[ProjectionGroup, GroupMemory] = {}

    def compile(self, dtype: torch.dtype) -> None:
        """Compiles the kernels for entries in `dtype`, or loads them from a cache, now instead of on first use."""
        _combine_kernel(FORMATS[dtype])
        routing = self.route(torch.zeros(1, 1), 1, normalised=True)
        nothing = np.full(1, -1, np.int32), np.zeros((1, 1, EXPERT_TARGETS), np.int32), 0, np.empty((1, 3), np.int32)
        _cut_tiles(routing.rows.numpy(), routing.starts.numpy(), *nothing)

    def route(self, logits: Tensor, top_k: int, *, normalised: bool, order: Tensor | None = None) -> Routing:
        """Chooses the experts of each row: `ExpertKernels.route`."""
        num_rows, count = logits.shape
        rows, starts = np.empty(num_rows * top_k, np.int32), np.zeros(count + 1, np.int32)
        places, weights = np.empty((num_rows, top_k), np.int32), np.empty((num_rows, top_k), np.float32)
        ordered = np.arange(num_rows) if order is None else order.numpy()
        _route(logits.float().numpy(), normalised, ordered, rows, starts, places, weights)
        return Routing(*map(torch.from_numpy, (rows, starts, places, weights)))

    def combine(self, entries: Tensor, routing: Routing) -> Tensor:
        """Returns the weighted sum of each row's entries: `ExpertKernels.combine`."""
        entries, (rows, top_k), width = entries.contiguous(), routing.places.shape, entries.shape[1]
        out = self._team.empty((rows, width), entries.dtype)
        addresses = (tensor.data_ptr() for tensor in (routing.places, routing.weights, entries, out))
        block = CombineBlock(0, 0, rows, top_k, *addresses, width)
        self._team.run(_combine_kernel(FORMATS[entries.dtype]), block, rows)
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
    ) -> NumbaLora | None:
        """Segments the entries by adapter and prepares their LoRA: `ExpertKernels.prepare_lora`."""
        rows, starts = routing.rows.numpy(), routing.starts.numpy()
        tiles = np.empty((len(rows), 3), np.int32)
        place = layer * table.host_ranks.shape[2] + first_target
        count = _cut_tiles(rows, starts, adapters.slots.numpy(), table.host_ranks, place, tiles)
        if not count:
            return None
        entries = np.arange(len(rows), dtype=np.int32)
        memories = self._memories
        return NumbaLora(arena, table.by_expert(), entries, tiles[:count], memories=memories, is_touched=True)


@cached(njit(cache=True, nogil=True, error_model="numpy"))
def _route(logits, normalised, order, rows, starts, places, weights):
    """Fills in the fields of `Routing`. `starts` is all zeros at first."""
    count, top_k = logits.shape[1], places.shape[1]
    for row in range(len(logits)):
        line, chosen, values = logits[row], places[row], weights[row]
        _choose(line, chosen, values)
        largest, total = values[0], np.float32(0)
        if normalised:
            for k in range(top_k):
                total += math.exp(values[k] - largest)
        else:
            for expert in range(count):
                total += math.exp(line[expert] - largest)
        for k in range(top_k):
            values[k] = math.exp(values[k] - largest) / total
            starts[chosen[k] + 1] += 1
    for expert in range(count):
        starts[expert + 1] += starts[expert]
    following = starts.copy()
    for row in order:
        for k in range(top_k):
            expert = places[row, k]
            place = following[expert]
            rows[place] = row
            places[row, k] = place
            following[expert] += 1


@njit(error_model="numpy")
def _choose(line, chosen, values):
    """Finds the largest numbers of a line, in descending order: their places go to `chosen`, they to `values`."""
    top_k, filled = len(chosen), 0
    for expert in range(len(line)):
        value = line[expert]
        if filled == top_k and not value > values[top_k - 1]:
            continue
        k = min(filled, top_k - 1)
        filled = min(filled + 1, top_k)
        while k > 0 and values[k - 1] < value:
            values[k], chosen[k] = values[k - 1], chosen[k - 1]
            k -= 1
        values[k], chosen[k] = value, expert


@cached(njit(cache=True, nogil=True, error_model="numpy"))
def _cut_tiles(rows, starts, slots, ranks, place, tiles):
    """Cuts entries into tiles of up to MAX_ROWS neighbours with the same expert and the same adapter that changes it.

    Args:
        rows, starts: see `Routing`.
        slots: int32 [num_rows]. Adapter slot of each row, -1 for the base model.
        ranks: int32 [adapter slots, layers, targets]. See `LoraTable.host_ranks`.
        place: number of the gate of expert 0 among the targets of all layers.
        tiles: int32 [num_entries, 3], filled in: (virtual slot, first entry, number of entries).

    Returns:
        The number of tiles.
    """
    of_slot, count = ranks.shape[1] * ranks.shape[2], 0
    flat = ranks.reshape(-1)
    for expert in range(len(starts) - 1):
        last = -1
        for entry in range(starts[expert], starts[expert + 1]):
            slot = slots[rows[entry]]
            if slot >= 0 and slot == last and tiles[count - 1, 2] < MAX_ROWS:
                tiles[count - 1, 2] += 1
                continue
            first = slot * of_slot + place + EXPERT_TARGETS * expert
            last = -1
            if slot >= 0 and flat[first] + flat[first + 1] + flat[first + 2]:
                tiles[count, 0], tiles[count, 1], tiles[count, 2] = first // EXPERT_TARGETS, entry, 1
                last = slot
                count += 1
    return count
