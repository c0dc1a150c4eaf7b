"""LoRA on a GPU: two launches a projection group, whatever the number of adapters, targets and ranks.

Shrink multiplies each tile of rows with one rank tile of its adapter's A; expand multiplies the result with B and adds
it to the base output. The inner dimension of shrink is cut into a fixed number of parts, whose sums meet in a workspace
and are added by expand in a fixed order: no atomics, nothing to clear, and the same bits for a row whoever shares the
batch with it. Tensor cores are fed 16 rows even for one: decoding is bound by reading the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.layout import ALIGN, MAX_TILES, RANK_TILE, LoraTable, ProjectionGroup
from lora_kernels.segments import SegmentPlan

ROW_TILE = 16
"""Rows a tile: the height of a tensor-core tile."""
BLOCK_K = 256
BLOCK_N = 128
K_PER_SPLIT = 1024
MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class PreparedLora:
    """What every layer of a step shares, on the device.

    Attributes:
        rows: int32 [num_lora_rows]. Batch rows sorted by adapter.
        row_tiles: int32 [num_row_tiles, 4]. (slot, first index into `rows`, number of rows, 0) of each tile.
        shrink_tiles: int32 [num_shrink_tiles, 4]. The same with a rank tile, for every rank tile of the adapter.
        max_rank: largest rank of the batch, in whole rank tiles.
    """

    arena: Tensor
    table: LoraTable
    rows: Tensor
    row_tiles: Tensor
    shrink_tiles: Tensor
    max_rank: int


def prepare(arena: Tensor, table: LoraTable, plan: SegmentPlan) -> PreparedLora | None:
    """See `Backend.prepare_lora`. One upload."""
    ranks = table.host_ranks[plan.slots].max(axis=(1, 2), initial=0)
    row_tiles, shrink_tiles = _cut_tiles(plan, ranks)
    if not len(row_tiles):
        return None
    parts = (row_tiles.reshape(-1), shrink_tiles.reshape(-1), plan.rows)
    host = torch.from_numpy(np.concatenate(parts).astype(np.int32))
    if arena.is_cuda:
        host = host.pin_memory()
    device = host.to(arena.device, non_blocking=True).split([part.size for part in parts])
    max_rank = -(-int(ranks.max()) // RANK_TILE) * RANK_TILE
    return PreparedLora(arena, table, device[2], device[0].view(-1, 4), device[1].view(-1, 4), max_rank)


def _cut_tiles(plan: SegmentPlan, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row tiles of the segments with a rank, and the same for each of their rank tiles; widest adapters first."""
    order = np.argsort(-ranks, kind="stable")[: int(np.count_nonzero(ranks))]
    counts = -(-plan.lengths[order] // ROW_TILE)
    segment = np.repeat(order, counts)
    within = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = plan.starts[segment] + within * ROW_TILE
    num_rows = np.minimum(plan.starts[segment + 1] - first, ROW_TILE)
    row_tiles = np.stack([plan.slots[segment], first, num_rows, np.zeros_like(first)], axis=1)
    rank_tiles = -(-ranks[segment] // RANK_TILE)
    shrink_tiles = np.repeat(row_tiles, rank_tiles, axis=0)
    shrink_tiles[:, 3] = np.arange(len(shrink_tiles)) - np.repeat(np.cumsum(rank_tiles) - rank_tiles, rank_tiles)
    return row_tiles, shrink_tiles


def num_splits(in_features: int) -> int:
    """Parts of the inner dimension. Depends on nothing else, so that a row's sums are always added the same way."""
    return min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(in_features, K_PER_SPLIT)))


def add(out: Tensor, x: Tensor, prepared: PreparedLora, layer: int, group: ProjectionGroup) -> None:
    """See `Backend.add_lora`."""
    splits, num_rows = num_splits(group.in_features), len(prepared.rows)
    table, max_rank = prepared.table, prepared.max_rank
    workspace = x.new_empty((splits, len(group.targets), num_rows, max_rank), dtype=torch.float32)
    _, layers, targets = table.ranks.shape
    shrink_kernel[(len(prepared.shrink_tiles), len(group.targets), splits)](
        x,
        prepared.arena,
        workspace,
        table.offsets,
        table.ranks,
        prepared.shrink_tiles,
        prepared.rows,
        layer,
        num_rows,
        max_rank,
        x.stride(0),
        LAYERS=layers,
        TARGETS=targets,
        GROUP=group.targets,
        IN_FEATURES=group.in_features,
        SPLITS=splits,
        BLOCK_M=ROW_TILE,
        BLOCK_R=RANK_TILE,
        BLOCK_K=BLOCK_K,
        MAX_TILES=MAX_TILES,
        ALIGN=ALIGN,
        num_warps=4,
        num_stages=3,
    )
    column_blocks = sum(triton.cdiv(features, BLOCK_N) for features in group.out_features)
    expand_kernel[(len(prepared.row_tiles), column_blocks)](
        out,
        prepared.arena,
        workspace,
        table.offsets,
        table.ranks,
        prepared.row_tiles,
        prepared.rows,
        layer,
        num_rows,
        max_rank,
        out.stride(0),
        LAYERS=layers,
        TARGETS=targets,
        GROUP=group.targets,
        OUT_FEATURES=group.out_features,
        SPLITS=splits,
        BLOCK_M=ROW_TILE,
        BLOCK_R=RANK_TILE,
        BLOCK_N=BLOCK_N,
        MAX_TILES=MAX_TILES,
        ALIGN=ALIGN,
        num_warps=4,
        num_stages=2,
    )


@triton.jit(do_not_specialize=["layer", "num_rows", "max_rank"])
def shrink_kernel(
    x_ptr,
    arena_ptr,
    workspace_ptr,
    offsets_ptr,
    ranks_ptr,
    tiles_ptr,
    rows_ptr,
    layer,
    num_rows,
    max_rank,
    x_stride,
    LAYERS: tl.constexpr,
    TARGETS: tl.constexpr,
    GROUP: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAX_TILES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """workspace[split, index, row, rank tile] = x[row, part of K] A^T, for one (row tile, rank tile, target, split)."""
    index = tl.program_id(1)
    split = tl.program_id(2)
    target = 0
    for i in tl.static_range(len(GROUP)):
        target = tl.where(index == i, GROUP[i], target)
    item = tiles_ptr + tl.program_id(0) * 4
    slot, first, count, rank_tile = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    entry = (slot * LAYERS + layer) * TARGETS + target
    rank = tl.load(ranks_ptr + entry)
    if rank_tile * BLOCK_R < rank:
        start = tl.load(offsets_ptr + entry * (2 * MAX_TILES) + rank_tile).to(tl.int64) * ALIGN
        m = tl.arange(0, BLOCK_M)
        r = tl.arange(0, BLOCK_R)
        row = tl.load(rows_ptr + first + m, mask=m < count, other=0).to(tl.int64)
        a_mask = (r < rank - rank_tile * BLOCK_R)[None, :]
        x_mask = (m < count)[:, None]
        PART: tl.constexpr = ((IN_FEATURES + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)) * BLOCK_K
        total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for step in range(0, PART, BLOCK_K):
            k = split * PART + step + tl.arange(0, BLOCK_K)
            inside = k < IN_FEATURES
            x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=x_mask & inside[None, :], other=0.0)
            a = tl.load(
                arena_ptr + start + r[None, :] * IN_FEATURES + k[:, None], mask=a_mask & inside[:, None], other=0.0
            )
            total = tl.dot(x, a, total, input_precision="ieee")
        place = (split * len(GROUP) + index) * num_rows + first + m
        column = rank_tile * BLOCK_R + r
        tl.store(workspace_ptr + place[:, None].to(tl.int64) * max_rank + column[None, :], total, mask=x_mask)


@triton.jit(do_not_specialize=["layer", "num_rows", "max_rank"])
def expand_kernel(
    out_ptr,
    arena_ptr,
    workspace_ptr,
    offsets_ptr,
    ranks_ptr,
    tiles_ptr,
    rows_ptr,
    layer,
    num_rows,
    max_rank,
    out_stride,
    LAYERS: tl.constexpr,
    TARGETS: tl.constexpr,
    GROUP: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_TILES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """out[row, columns] += (sum of the splits) B, for one (row tile, block of columns of one target)."""
    block = tl.program_id(1)
    index = 0
    target = GROUP[0]
    features = OUT_FEATURES[0]
    column = 0
    within = block
    blocks_before = 0
    columns_before = 0
    for i in tl.static_range(len(GROUP)):
        here = block >= blocks_before
        index = tl.where(here, i, index)
        target = tl.where(here, GROUP[i], target)
        features = tl.where(here, OUT_FEATURES[i], features)
        column = tl.where(here, columns_before, column)
        within = tl.where(here, block - blocks_before, within)
        blocks_before += (OUT_FEATURES[i] + BLOCK_N - 1) // BLOCK_N
        columns_before += OUT_FEATURES[i]
    item = tiles_ptr + tl.program_id(0) * 4
    slot, first, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    entry = (slot * LAYERS + layer) * TARGETS + target
    rank = tl.load(ranks_ptr + entry)
    if rank > 0:
        m = tl.arange(0, BLOCK_M)
        r = tl.arange(0, BLOCK_R)
        n = within * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask = (m < count)[:, None]
        n_mask = (n < features)[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        place = (index * num_rows + first + m).to(tl.int64) * max_rank
        for done in range(0, rank, BLOCK_R):
            start = tl.load(offsets_ptr + entry * (2 * MAX_TILES) + MAX_TILES + done // BLOCK_R).to(tl.int64) * ALIGN
            r_mask = r < rank - done
            part = workspace_ptr + place[:, None] + (done + r)[None, :]
            shrunk = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
            for split in tl.static_range(SPLITS):
                shrunk += tl.load(
                    part + split * (len(GROUP) * num_rows).to(tl.int64) * max_rank,
                    mask=row_mask & r_mask[None, :],
                    other=0.0,
                )
            b = tl.load(
                arena_ptr + start + r[:, None] * features + n[None, :], mask=r_mask[:, None] & n_mask, other=0.0
            )
            total = tl.dot(shrunk.to(b.dtype), b, total, input_precision="ieee")
        row = tl.load(rows_ptr + first + m, mask=m < count, other=0).to(tl.int64)
        place_out = out_ptr + row[:, None] * out_stride + (column + n)[None, :]
        mask = row_mask & n_mask
        base = tl.load(place_out, mask=mask, other=0.0)
        tl.store(place_out, (base.to(tl.float32) + total).to(base.dtype), mask=mask)
