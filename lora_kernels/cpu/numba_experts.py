"""Routing, gathering, combination and LoRA of experts in numba, for CPU tensors. What differs from step to step is
passed between kernels in memory, so that a tape may record all of it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from numba import carray, float32
from torch import Tensor

from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import FORMATS, Format, load_as, rounded, size_of, store_as
from lora_kernels.cpu.numba_lora import find_targets, group_arguments, scratch_bytes
from lora_kernels.cpu.numba_routing import CutBlock, RouteBlock, cut_kernel, route_kernel
from lora_kernels.cpu.openmp import ITEM, TICKETS, Kernel, Team
from lora_kernels.cpu.simd import LANES
from lora_kernels.layout import LoraTable, ProjectionGroup
from lora_kernels.routing import Routing, RowAdapters


class CombineBlock(ctypes.Structure):
    """Argument block of the weighted sum of entries: addresses. `places` is int32 and `weights` fp32 [rows, top_k]. If
    `weights` is 0, each row is a copy of its only entry."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("rows", "top_k", "places", "weights", "entries", "out", "width")),
    ]


@cache
def _combine_kernel(fmt: Format) -> Kernel:
    """Return the kernel that adds up entries in `fmt`, compiled on first use."""

    def combine(pointer):
        block = carray(pointer, 1)[0]
        row = simd.take_ticket(pointer, ITEM)
        while row < block.rows:
            if block.weights:
                _combine_row(fmt, block, row)
            else:
                _copy_row(fmt, block, row)
            row = simd.take_ticket(pointer, ITEM)

    return Kernel(combine, CombineBlock)


@simd.inner
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


@simd.inner
def _copy_row(fmt, block, row):
    size, source = size_of(fmt), simd.read_i32(block.places + 4 * row)
    for i in range(0, block.width, LANES):
        part = load_as(fmt, block.entries + (source * block.width + i) * size, block.width - i)
        store_as(fmt, block.out + (row * block.width + i) * size, part, block.width - i)


@dataclass(frozen=True, slots=True)
class EntryLora:
    """The LoRA data of a layer's entries."""

    arena: Tensor
    table: LoraTable
    """The table by expert, in which each virtual slot has one layer."""
    numbers: Tensor
    """int32 [entries]: 0, 1, 2 and so on. The LoRA kernel takes them as the `rows` of `LoraArguments`, because the
    entries of a tile are neighbours."""
    tiles: Tensor
    count: Tensor
    """`tiles` and `count`: int32 [entries, 3] and int64 [1]. The tiles and their number: see `CutBlock`."""

    def add(self, out: Tensor, x: Tensor, layer: int, group: ProjectionGroup, team: Team, kernel: Kernel) -> None:
        """Add B A x of each entry's own adapter to `out` [entries, sum(out_features)] in place, like
        `NumbaLora.add`."""
        scratch = team.empty((torch.get_num_threads(), scratch_bytes(group.in_features)), torch.uint8)
        block = group_arguments(self.arena, group, find_targets(group), len(self.tiles), scratch)
        block.tiles, block.count, block.rows = (one.data_ptr() for one in (self.tiles, self.count, self.numbers))
        block.point_to(out, x, self.table, layer)
        team.run(kernel, block, block.num_items)


class NumbaExperts:
    """`ExpertKernels` for CPU tensors. A `Team` of threads runs kernels in parallel; they are compiled on first use."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def compile(self, dtype: torch.dtype) -> None:
        """Compile the kernels for entries in `dtype`, or load them from a cache, now instead of on first use."""
        _combine_kernel(FORMATS[dtype])
        route_kernel(FORMATS[dtype])
        cut_kernel()

    def route(self, logits: Tensor, top_k: int, *, normalised: bool, order: Tensor | None = None) -> Routing:
        """Choose the experts of each row: `ExpertKernels.route`."""
        logits = logits.contiguous()
        (rows, count), empty, ints = logits.shape, self._team.empty, torch.int32
        entry_rows, starts = empty((rows * top_k,), ints), empty((count + 1,), ints)
        places, weights = empty((rows, top_k), ints), empty((rows, top_k), torch.float32)
        scratch = empty((2, count), torch.float32)
        written = (tensor.data_ptr() for tensor in (entry_rows, starts, places, weights, *scratch))
        block = RouteBlock(
            0, 0, rows, count, top_k, normalised, logits.data_ptr(), logits.element_size() * count,
            0 if order is None else order.data_ptr(), *written,
        )  # fmt: skip
        self._team.run(route_kernel(FORMATS[logits.dtype]), block, 1)
        return Routing(entry_rows, starts, places, weights)

    def gather(self, x: Tensor, routing: Routing) -> Tensor:
        """Return each entry's row of `x`: `ExpertKernels.gather`."""
        x, rows = x.contiguous(), routing.rows
        out = self._team.empty((len(rows), x.shape[1]), x.dtype)
        self._combine(CombineBlock(0, 0, len(rows), 1, rows.data_ptr(), 0, x.data_ptr(), out.data_ptr()), out)
        return out

    def combine(self, entries: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of each row's entries: `ExpertKernels.combine`."""
        entries, (rows, top_k) = entries.contiguous(), routing.places.shape
        out = self._team.empty((rows, entries.shape[1]), entries.dtype)
        addresses = (tensor.data_ptr() for tensor in (routing.places, routing.weights, entries, out))
        self._combine(CombineBlock(0, 0, rows, top_k, *addresses), out)
        return out

    def _combine(self, block: CombineBlock, out: Tensor) -> None:
        block.width = out.shape[1]
        self._team.run(_combine_kernel(FORMATS[out.dtype]), block, block.rows)

    def prepare_lora(
        self,
        arena: Tensor,
        table: LoraTable,
        adapters: RowAdapters,
        routing: Routing,
        layer: int,
        first_target: int,
        max_features: int,
    ) -> EntryLora:
        """Segments the entries by adapter and prepares their LoRA: `ExpertKernels.prepare_lora`."""
        entries, empty, targets = len(routing.rows), self._team.empty, table.host_ranks.shape[2]
        numbers, tiles = empty((entries,), torch.int32), empty((entries, 3), torch.int32)
        count = empty((1,), torch.int64)
        block = CutBlock(
            experts=len(routing.starts) - 1,
            entries=entries,
            entry_rows=routing.rows.data_ptr(),
            starts=routing.starts.data_ptr(),
            slots=adapters.slots.data_ptr(),
            ranks=table.host_ranks.ctypes.data,
            of_slot=table.host_ranks.shape[1] * targets,
            place=layer * targets + first_target,
            numbers=numbers.data_ptr(),
            tiles=tiles.data_ptr(),
            count=count.data_ptr(),
        )
        self._team.run(cut_kernel(), block, 1)
        return EntryLora(arena, table.by_expert(), numbers, tiles, count)
