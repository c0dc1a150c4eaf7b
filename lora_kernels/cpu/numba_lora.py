"""LoRA on the CPU, reading weights from the arena's pages in place, at every adapter's real rank. An *item*, up to four
rows of one adapter, is shrunk and expanded by one thread, which reads each weight once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from numba import carray
from torch import Tensor

from lora_kernels.backend import ProjectionGroup
from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import Format, load_as, size_of, store_as
from lora_kernels.cpu.openmp import ITEM, THREAD, TICKETS, Kernel, Team
from lora_kernels.cpu.products import MAX_ROWS, dot_rows, mix_rows
from lora_kernels.cpu.simd import LANES
from lora_kernels.layout import ALIGN, MAX_RANK, MAX_TILES, RANK_TILE, SIDE_A, SIDE_B, LoraTable
from lora_kernels.segments import SegmentPlan

# Items of high rank come first, so that the last ones are short. A thread prefetches its next item's weights.

CHUNK = 512
"""Output columns computed at a time: their sums stay in the first-level cache."""

TILES_A_THREAD = 4
"""Tiles per thread from which on an item covers all projections: such items then still balance over the threads."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class LoraArguments(ctypes.Structure):
    """Argument block of the LoRA kernel: addresses, and strides in bytes. `of_step` names the fields that change every
    step (`Tape.renew`)."""

    # `tiles` is int32 [num_tiles, 3]: (adapter slot, first index in `rows`, number of rows). `targets` is int64
    # [num_targets, 3]: (index in the table, first output column, number of columns); an item has `item_targets` of
    # them. `count` is 0, or points to the number of tiles if only an earlier kernel knows it.
    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("num_items", "item_targets", "num_targets", "tiles", "targets", "rows")),
        *((name, ctypes.c_int64) for name in ("x", "x_row", "out", "out_row", "arena", "in_features")),
        *((name, ctypes.c_int64) for name in ("ranks", "ranks_slot", "offsets", "offsets_slot")),
        *((name, ctypes.c_int64) for name in ("scratch", "scratch_bytes", "count")),
    ]
    of_step = ("num_items", "item_targets", "tiles", "rows", "scratch", "scratch_bytes")

    def point_to(self, out: Tensor, x: Tensor, table: LoraTable, layer: int) -> None:
        """Set addresses and strides for one run: of outputs `out`, inputs `x` and the layer's table entries."""
        ranks, offsets = table.host_ranks, table.host_offsets
        self.x, self.x_row = x.data_ptr(), x.stride(0) * x.element_size()
        self.out, self.out_row = out.data_ptr(), out.stride(0) * out.element_size()
        self.ranks, self.ranks_slot = ranks.ctypes.data + layer * ranks.strides[1], ranks.strides[0]
        self.offsets, self.offsets_slot = offsets.ctypes.data + layer * offsets.strides[1], offsets.strides[0]


@cache
def make_kernel(fmt: Format, out_fmt: Format) -> Kernel:
    """Compile the kernel for inputs and weights in `fmt` and outputs in `out_fmt`. All backends share it."""

    def add(pointer):
        block = carray(pointer, 1)[0]
        scratch = block.scratch + simd.take_ticket(pointer, THREAD) * block.scratch_bytes
        num_items = block.num_items
        if block.count:
            num_items = simd.read_i64(block.count) * (block.num_targets // block.item_targets)
        item = simd.take_ticket(pointer, ITEM)
        while item < num_items:
            following = simd.take_ticket(pointer, ITEM)
            _add_item(block, fmt, out_fmt, scratch, item, following if following < num_items else item)
            item = following

    return Kernel(add, LoraArguments)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A projection group's argument block and the memory it points to, for all layers of one step. `touched` says for
    each layer whether any adapter of the step touches the group."""

    block: LoraArguments
    targets: Int64Array
    scratch: Tensor
    touched: tuple[bool, ...]


@dataclass(slots=True)
class NumbaLora:
    """The LoRA data of one step, which all layers share. `groups` caches each projection group's plan."""

    arena: Tensor
    table: LoraTable
    rows: Int32Array
    tiles: Int32Array
    groups: dict[ProjectionGroup, GroupPlan] = field(default_factory=dict)

    def add(self, out: Tensor, x: Tensor, layer: int, group: ProjectionGroup, team: Team, kernel: Kernel) -> None:
        """Add B A x of each row's own adapter to `out` in place: `Backend.add_lora`. `kernel` is `make_kernel`'s for
        the dtypes of `x` and `out`. A call that no adapter of the step needs is recorded on a tape but not run."""
        plan = self.plan(group)
        plan.block.point_to(out, x, self.table, layer)
        team.run(kernel, plan.block, plan.block.num_items if plan.touched[layer] else 0, group)

    def plan(self, group: ProjectionGroup) -> GroupPlan:
        """Return the plan of a projection group, made on first use, which all layers share in this step."""
        return self.groups.get(group) or self._plan(group)

    def _plan(self, group: ProjectionGroup) -> GroupPlan:
        targets = find_targets(group)
        scratch = torch.empty(torch.get_num_threads(), scratch_bytes(group.in_features), dtype=torch.uint8)
        block = group_arguments(self.arena, group, targets, len(self.tiles), scratch)
        block.tiles, block.rows = self.tiles.ctypes.data, self.rows.ctypes.data
        plan = self.groups[group] = GroupPlan(block, targets, scratch, self._touched(group))
        return plan

    def _touched(self, group: ProjectionGroup) -> tuple[bool, ...]:
        """Return, for each layer, whether any adapter of the step touches the group."""
        ranks = self.table.host_ranks[np.unique(self.tiles[:, 0])][:, :, list(group.targets)]
        touched: tuple[bool, ...] = tuple(np.any(ranks > 0, axis=(0, 2)).tolist())
        return touched


def prepare(arena: Tensor, table: LoraTable, plan: SegmentPlan) -> NumbaLora | None:
    """Return the LoRA data of one step, or None if it has no segments: `Backend.prepare_lora`."""
    if not plan.num_segments:
        return None
    return NumbaLora(arena, table, plan.rows, cut_tiles(plan, table.max_ranks))


def cut_tiles(plan: SegmentPlan, ranks: Int32Array) -> Int32Array:
    """Cut segments into tiles of up to four rows, highest ranks first. `ranks` [max_adapter_slots] holds each slot's
    largest rank. Return int32 [num_tiles, 3]: (adapter slot, first index into `plan.rows`, number of rows)."""
    counts = -(-plan.lengths // MAX_ROWS)
    segment = np.repeat(np.arange(plan.num_segments), counts)
    within = (np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)) * MAX_ROWS
    rows = np.minimum(MAX_ROWS, plan.lengths[segment] - within)
    tiles = np.stack([plan.adapter_slots[segment], plan.starts[segment] + within, rows], axis=1).astype(np.int32)
    return tiles[np.argsort(-ranks[tiles[:, 0]], kind="stable")]


@cache
def find_targets(group: ProjectionGroup) -> Int64Array:
    """Return the array `targets` of `LoraArguments` for a projection group. Its memory is never freed."""
    columns = np.cumsum((0, *group.out_features[:-1]))
    return np.stack([group.targets, columns, group.out_features], axis=1).astype(np.int64)


def group_arguments(
    arena: Tensor, group: ProjectionGroup, targets: Int64Array, num_tiles: int, scratch: Tensor
) -> LoraArguments:
    """Return the argument block for runs over `num_tiles` tiles of a projection group. The caller sets the remaining
    fields: `tiles`, `rows` and those of `LoraArguments.point_to`. `scratch` is uint8 [threads, bytes]."""
    whole = num_tiles >= TILES_A_THREAD * len(scratch)
    return LoraArguments(
        num_items=num_tiles * (1 if whole else len(targets)),
        item_targets=len(targets) if whole else 1,
        num_targets=len(targets),
        targets=targets.ctypes.data,
        arena=arena.data_ptr(),
        in_features=group.in_features,
        scratch=scratch.data_ptr(),
        scratch_bytes=scratch.shape[1],
    )


def scratch_bytes(in_features: int) -> int:
    """Return the scratch bytes of one thread: for each row of a tile, its input, its product with A, and a chunk of its
    output, in fp32."""
    return 4 * MAX_ROWS * (-(-in_features // LANES) * LANES + MAX_RANK + CHUNK)


@simd.inlined
def _add_item(block, fmt, out_fmt, scratch, item, following):
    (tile, target), (next_tile, next_target) = _parts(block, item), _parts(block, following)
    adapter_slot, next_adapter_slot, num_rows = simd.read_i32(tile), simd.read_i32(next_tile), simd.read_i32(tile + 8)
    if not _is_touched(block, adapter_slot, target):
        return
    rows = block.rows + 4 * simd.read_i32(tile + 4)
    width, size = block.in_features, size_of(fmt)
    x_bytes = 4 * (-(-width // LANES) * LANES)
    for r in range(num_rows):
        source = block.x + simd.read_i32(rows + 4 * r) * block.x_row
        for i in range(0, width, LANES):
            simd.store(scratch + r * x_bytes + 4 * i, load_as(fmt, source + size * i, width - i))
    for _ in range(block.item_targets):
        of, ahead = (adapter_slot, target), (next_adapter_slot, next_target)
        _add_target(block, fmt, out_fmt, scratch, x_bytes, rows, num_rows, of, ahead)
        target += 24
        next_target += 24


@simd.inner
def _is_touched(block, adapter_slot, target):
    """Return whether the adapter has a rank at any of an item's targets, the first of which is at address `target`. A
    tape runs the kernel for every layer and projection, touched or not."""
    ranks = 0
    for number in range(block.item_targets):
        ranks += _rank(block, (adapter_slot, target + 24 * number))
    return ranks > 0


@simd.inner
def _parts(block, item):
    """Return the addresses of the tile and of the first target of item number `item`."""
    parts = block.num_targets // block.item_targets
    return block.tiles + 12 * (item // parts), block.targets + 24 * block.item_targets * (item % parts)


@simd.inner
def _add_target(block, fmt, out_fmt, scratch, x_bytes, rows, num_rows, of, following):
    """Add one target's delta to an item's rows, whose inputs `scratch` holds in fp32, `x_bytes` apart. `of` and
    `following` are (adapter slot, address of the target) of this item and of the thread's next one."""
    simd.stay_apart()
    rank = _rank(block, of)
    if not rank:
        return
    columns, features = simd.read_i64(of[1] + 8), simd.read_i64(of[1] + 16)
    width, size = block.in_features, size_of(fmt)
    shrunk = scratch + MAX_ROWS * x_bytes
    shrunk_bytes = 4 * MAX_RANK
    sums = shrunk + MAX_ROWS * shrunk_bytes
    for first in range(0, rank, RANK_TILE):
        a, ahead = _weights(block, fmt, of, following, SIDE_A, first)
        tall, to = min(RANK_TILE, rank - first), shrunk + 4 * first
        dot_rows(fmt, num_rows, scratch, x_bytes, a, width * size, tall, width, to, shrunk_bytes, ahead)
    for chunk in range(0, features, CHUNK):
        count = min(CHUNK, features - chunk)
        _load_sums(block, out_fmt, rows, num_rows, columns + chunk, count, sums)
        for first in range(0, rank, RANK_TILE):
            b, ahead = _weights(block, fmt, of, following, SIDE_B, first)
            tall, p, w = min(RANK_TILE, rank - first), shrunk + 4 * first, b + chunk * size
            mix_rows(fmt, num_rows, p, shrunk_bytes, w, features * size, tall, count, sums, 4 * CHUNK, ahead)
        _store_sums(block, out_fmt, rows, num_rows, columns + chunk, count, sums)


@simd.inner
def _rank(block, of):
    adapter_slot, target = of
    return simd.read_i32(block.ranks + adapter_slot * block.ranks_slot + 4 * simd.read_i64(target))


@simd.inner
def _weights(block, fmt, of, following, side, first):
    """Return the address of the tile of A or B (`side`) of item `of` that begins at rank `first`, and the distance in
    bytes to that of the next item, `following`, or 0 if it has none."""
    here = _tile(block, fmt, of, side, first)
    return here, _tile(block, fmt, following, side, first) - here if first < _rank(block, following) else 0


@simd.inner
def _tile(block, fmt, of, side, first):
    adapter_slot, target = of
    offsets = block.offsets + adapter_slot * block.offsets_slot + simd.read_i64(target) * 8 * MAX_TILES
    return block.arena + simd.read_i32(offsets + 4 * (side * MAX_TILES + first // RANK_TILE)) * ALIGN * size_of(fmt)


@simd.inner
def _load_sums(block, fmt, rows, num_rows, column, count, sums):
    for r in range(num_rows):
        source = block.out + simd.read_i32(rows + 4 * r) * block.out_row + column * size_of(fmt)
        for i in range(0, count, LANES):
            simd.store(sums + 4 * (r * CHUNK + i), load_as(fmt, source + size_of(fmt) * i, count - i))


@simd.inner
def _store_sums(block, fmt, rows, num_rows, column, count, sums):
    for r in range(num_rows):
        to = block.out + simd.read_i32(rows + 4 * r) * block.out_row + column * size_of(fmt)
        for i in range(0, count, LANES):
            store_as(fmt, to + size_of(fmt) * i, simd.load(sums + 4 * (r * CHUNK + i)), count - i)
