"""Lists of LoRA tiles of experts' entries, made on the device, because the host does not know the entries, in the
layout of the host's own lists. Entries are sorted by expert and then by adapter."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_lora_plan import COUNT, HEADER, TritonLora, list_sections, round_up, tile_lists
from lora_kernels.gpu.triton_lora_tuning import LoraTuning
from lora_kernels.layout import EXPERT_TARGETS, RANK_TILE, LoraTable
from lora_kernels.routing import Routing, RowAdapters, slots_each

BLOCK = 128
"""Entries of an expert that a program compares with each other at a time. No tile has entries of two blocks."""
WARPS = 8
"""Warps of a program. Four have no registers for BLOCK x BLOCK comparisons beside the lists of long segments."""
LISTS = 4
"""Number of lists in `TileLists`."""


def prepare(
    arena: Tensor,
    table: LoraTable,
    adapters: RowAdapters,
    routing: Routing,
    first_slot: int,
    max_features: int,
    tuning: LoraTuning,
) -> TritonLora:
    """Return the LoRA data of entries, for layer 0 and the targets 0, 1 and 2 of `table.by_expert()`, in two launches.
    `first_slot` is the virtual slot of expert 0 of adapter slot 0, `max_features` the widest input."""
    entries, experts = len(routing.rows), len(routing.starts) - 1
    has_long = adapters.max_rows >= tuning.long_from
    max_rank = round_up(adapters.max_rank, RANK_TILE)
    capacities = _capacities(entries, experts, max_rank, tuning, has_long)
    sections = list_sections(entries, capacities)
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": arena.device}
    meta, counts = torch.empty(sections[-1], **numbers), torch.empty(LISTS * experts, **numbers)
    virtual = table.by_expert()
    constants = {
        "SLOTS_EACH": slots_each(table),
        "TARGETS": EXPERT_TARGETS,
        "EXPERTS": experts,
        "EXPERT_BLOCK": triton.next_power_of_2(experts),
        **tile_constants(tuning, has_long),
    }
    for write in (False, True):
        kernel = with_constants(expert_tiles_kernel, WRITE=write, **constants, num_warps=WARPS)
        tensors = (routing.rows, routing.starts, adapters.slots, virtual.ranks, counts, meta)
        kernel((experts,), *tensors, first_slot, *sections[1:-1])
    parts = 2 * tuning.num_splits(max_features)
    sums = torch.empty((parts, entries, max_rank), dtype=torch.float32, device=arena.device)
    lists = tile_lists(meta, sections, capacities)
    return TritonLora(arena, virtual, meta[HEADER : HEADER + entries], lists, sums, tuning)


def tile_constants(tuning: LoraTuning, has_long: bool) -> dict[str, Any]:
    """Return the constants of `expert_tiles_kernel` that follow from a tuning."""
    long = {"LONG_FROM": tuning.long_from, "LONG_ROWS": tuning.long_rows, "LONG_RANKS": tuning.long_ranks}
    short = {"TILE_ROWS": tuning.tile_rows, "RANK_TILE": RANK_TILE}
    return {"HAS_LONG": has_long, **long, **short, "HEADER": HEADER, "COUNT": COUNT, "BLOCK": BLOCK}


def _capacities(
    entries: int, experts: int, max_rank: int, tuning: LoraTuning, has_long: bool
) -> tuple[int, int, int, int]:
    """Return the largest possible number of tiles in each list. A block may begin and end with a part of a long segment
    that is itself shorter than a long segment."""
    long = 0
    if has_long:
        blocks, pieces = experts + entries // BLOCK, BLOCK // tuning.long_from + 2
        long = min(entries, blocks * (BLOCK // tuning.long_rows + pieces))
    return entries, entries * max_rank // RANK_TILE, long, long * -(-max_rank // tuning.long_ranks)


@triton.jit(do_not_specialize=["first_slot", "short_start", "shrink_start", "long_start", "long_shrink_start"])
def expert_tiles_kernel(
    rows_ptr,
    starts_ptr,
    row_slots_ptr,
    ranks_ptr,
    counts_ptr,
    meta_ptr,
    first_slot,
    short_start,
    shrink_start,
    long_start,
    long_shrink_start,
    SLOTS_EACH: tl.constexpr,
    TARGETS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    HAS_LONG: tl.constexpr,
    LONG_FROM: tl.constexpr,
    LONG_ROWS: tl.constexpr,
    LONG_RANKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    RANK_TILE: tl.constexpr,
    HEADER: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Count the tiles of one expert in each list or, with WRITE, write them after those of the experts before it.
    Within a block, an entry's index in its segment is the number of earlier entries with the same adapter."""
    expert = tl.program_id(0)
    end = tl.load(starts_ptr + expert + 1)
    i = tl.arange(0, BLOCK)
    short, shrink, long, long_shrink = 0, 0, 0, 0
    if WRITE:
        short = _tiles_before(counts_ptr, meta_ptr, expert, EXPERTS, EXPERT_BLOCK)
        shrink = _tiles_before(counts_ptr + EXPERTS, meta_ptr + COUNT, expert, EXPERTS, EXPERT_BLOCK)
        if HAS_LONG:
            long = _tiles_before(counts_ptr + 2 * EXPERTS, meta_ptr + 2 * COUNT, expert, EXPERTS, EXPERT_BLOCK)
            long_shrink = _tiles_before(counts_ptr + 3 * EXPERTS, meta_ptr + 3 * COUNT, expert, EXPERTS, EXPERT_BLOCK)
    last_slot, last_start = -1, 0
    for first in range(tl.load(starts_ptr + expert), end, BLOCK):
        entry = first + i
        row = tl.load(rows_ptr + entry, mask=entry < end, other=0)
        slot = tl.load(row_slots_ptr + row, mask=entry < end, other=-1)
        virtual = slot * SLOTS_EACH + first_slot + expert
        ranks = ranks_ptr + virtual * TARGETS
        rank = tl.load(ranks, mask=slot >= 0, other=0)
        rank = tl.maximum(rank, tl.load(ranks + 1, mask=slot >= 0, other=0))
        rank = tl.maximum(rank, tl.load(ranks + 2, mask=slot >= 0, other=0))
        same = slot[:, None] == slot[None, :]
        before = tl.sum((same & (i[None, :] < i[:, None])).to(tl.int32), axis=1)
        length = tl.sum(same.to(tl.int32), axis=1)
        is_long = rank < 0
        tile_rows = tl.zeros((BLOCK,), dtype=tl.int32) + TILE_ROWS
        if HAS_LONG:
            start = tl.where(slot == last_slot, last_start, entry - before)
            far = start + LONG_FROM - 1
            far_row = tl.load(rows_ptr + far, mask=far < end, other=0)
            is_long = tl.load(row_slots_ptr + far_row, mask=far < end, other=-1) == slot
            tile_rows = tl.where(is_long, LONG_ROWS, TILE_ROWS)
            last_slot = tl.sum(tl.where(i == BLOCK - 1, slot, 0), axis=0)
            last_start = tl.sum(tl.where(i == BLOCK - 1, start, 0), axis=0)
        is_tile = (rank > 0) & (before % tile_rows == 0)
        count = tl.minimum(tile_rows, length - before)
        if WRITE:
            tl.store(meta_ptr + HEADER + entry, entry, mask=entry < end)
        tile_ranks = tl.where(is_tile & (is_long == 0), rank, 0)
        short = _add_tiles(meta_ptr + short_start, short, virtual, entry, count, tile_ranks, 1 << 30, WRITE)
        shrink = _add_tiles(meta_ptr + shrink_start, shrink, virtual, entry, count, tile_ranks, RANK_TILE, WRITE)
        if HAS_LONG:
            tile_ranks = tl.where(is_tile & is_long, rank, 0)
            long = _add_tiles(meta_ptr + long_start, long, virtual, entry, count, tile_ranks, 1 << 30, WRITE)
            long_shrink = _add_tiles(
                meta_ptr + long_shrink_start, long_shrink, virtual, entry, count, tile_ranks, LONG_RANKS, WRITE
            )
    if not WRITE:
        tl.store(counts_ptr + expert, short)
        tl.store(counts_ptr + EXPERTS + expert, shrink)
        tl.store(counts_ptr + 2 * EXPERTS + expert, long)
        tl.store(counts_ptr + 3 * EXPERTS + expert, long_shrink)


@triton.jit
def _tiles_before(counts_ptr, total_ptr, expert, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr):
    """Return the number of tiles of the experts before this one. The first expert stores that of all experts."""
    e = tl.arange(0, EXPERT_BLOCK)
    counts = tl.load(counts_ptr + e, mask=e < EXPERTS, other=0)
    tl.store(total_ptr, tl.sum(counts, axis=0), mask=expert == 0)
    return tl.sum(tl.where(e < expert, counts, 0), axis=0)


@triton.jit
def _add_tiles(list_ptr, number, slots, first, counts, ranks, EACH: tl.constexpr, WRITE: tl.constexpr):
    """Count the tiles of EACH ranks that cover the `ranks` of each entry, and return `number` plus this count. With
    WRITE, also writes them to a list from index `number` on: (virtual slot, first entry, entries, first rank)."""
    tiles = (ranks + EACH - 1) // EACH
    if WRITE:
        ends = number + tl.cumsum(tiles, axis=0)
        for tile in range(tl.max(tiles, axis=0)):
            place = list_ptr + (ends - tiles + tile) * 4
            tl.store(place, slots, mask=tile < tiles)
            tl.store(place + 1, first, mask=tile < tiles)
            tl.store(place + 2, counts, mask=tile < tiles)
            tl.store(place + 3, tile * EACH + slots * 0, mask=tile < tiles)
    return number + tl.sum(tiles, axis=0)
