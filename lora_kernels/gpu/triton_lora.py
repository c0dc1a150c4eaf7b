"""LoRA on a GPU, for any adapters with two launches per projection group, or four with short and long segments.

Shrink multiplies each tile of rows with some ranks of its adapter's A; expand multiplies the result with B and adds it
to the base output. Weights are the left operand of a tensor-core product, and rows of the batch are its columns: 16
ranks fill the height of an instruction, and 8 columns are its minimum width, so that one row costs little more than
reading its adapter, and several rows share one read. Tiles of every width use the same instruction. The inner dimension
is cut into parts that depend only on its length, and their sums are added in a fixed order. A row's result therefore
has the same bits in every batch. The kernels use no atomics, and no memory must be cleared for them.

Kernels walk lists of tiles (triton_lora_plan.py) whose lengths are in device memory, so that a launch can be recorded
once and replayed for any set of adapters. docs/kernels-lora.md has the pictures and the numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.gpu.launch import Launcher, with_constants
from lora_kernels.gpu.triton_lora_plan import TileList, TritonLora
from lora_kernels.gpu.triton_lora_tuning import PART_UNIT, LoraTuning
from lora_kernels.layout import ALIGN, FP8_SCALES, MAX_TILES, RANK_TILE, ProjectionGroup

LAYOUT = {"ALIGN": ALIGN, "RANK_TILE": RANK_TILE, "MAX_TILES": MAX_TILES}


def add(out: Tensor, x: Tensor, prepared: TritonLora, layer: int, group: ProjectionGroup) -> None:
    """Adds B A x of each row's own adapter to `out` [num_rows, sum(out_features)] in place: `Backend.add_lora`."""
    shrink(x, prepared, layer, group)
    expand(out, prepared, layer, group)


def shrink(x: Tensor, prepared: TritonLora, layer: int, group: ProjectionGroup) -> None:
    """Computes A x for `x` [num_rows, group.in_features], the first half of `add`, into `prepared.sums`. It may run
    while the base projection does. Raises ValueError if splits x targets exceed the parts of `prepared.sums`."""
    splits = prepared.tuning.num_splits(group.in_features)
    if splits * len(group.targets) > len(prepared.sums):
        raise ValueError(f"{group.name} needs {splits * len(group.targets)} sums a rank, not {len(prepared.sums)}")
    for tiles, long in ((prepared.lists.shrink, False), (prepared.lists.long_shrink, True)):
        grid = (len(group.targets), tiles.programs, 1 if long else splits)
        if tiles.programs:
            kernel = _shrink_launcher(prepared.tuning, group, *_table_shape(prepared), long)
            kernel(
                grid,
                x,
                _stored(prepared),
                *_tables(prepared, tiles),
                layer,
                *prepared.sums.shape[1:],
                x.stride(0),
            )


def expand(out: Tensor, prepared: TritonLora, layer: int, group: ProjectionGroup) -> None:
    """Computes the second half of `add`: multiplies `prepared.sums`, which `shrink` filled for the same layer and
    group, with B, and adds the result to `out` [num_rows, sum(group.out_features)] in place."""
    for tiles, long in ((prepared.lists.rows, False), (prepared.lists.long_rows, True)):
        if tiles.programs:
            kernel, blocks = _expand_launcher(prepared.tuning, group, *_table_shape(prepared), long)
            kernel(
                (blocks, tiles.programs),
                out,
                _stored(prepared),
                prepared.arena.view(torch.float32) if prepared.table.fp8 else prepared.arena,
                *_tables(prepared, tiles),
                layer,
                *prepared.sums.shape[1:],
                out.stride(0),
            )


def _stored(prepared: TritonLora) -> Tensor:
    """Returns the arena viewed in the dtype in which kernels read A and B tiles: int8 for FP8."""
    return prepared.arena.view(torch.int8) if prepared.table.fp8 else prepared.arena


def _tables(prepared: TritonLora, tiles: TileList) -> tuple[Tensor, ...]:
    """Returns the tensors of sums, tables and tiles that both kernels take, in the order of their arguments."""
    table = prepared.table
    return (prepared.sums, table.offsets, table.ranks, tiles.tiles, tiles.count, prepared.rows)


def _table_shape(prepared: TritonLora) -> tuple[int, int, bool]:
    """Returns the numbers of layers and targets of the adapter table, and whether adapters are in FP8."""
    _, layers, targets = prepared.table.ranks.shape
    return layers, targets, prepared.table.fp8


@cache
def _shrink_launcher(
    tuning: LoraTuning, group: ProjectionGroup, layers: int, targets: int, fp8: bool, long: bool
) -> Launcher:
    return with_constants(
        shrink_kernel,
        **_constants(group, layers, targets, fp8),
        IN_FEATURES=group.in_features,
        SPLITS=tuning.num_splits(group.in_features),
        PART_UNIT=PART_UNIT,
        **tuning.shrink_options(long, fp8),
    )


@cache
def _expand_launcher(
    tuning: LoraTuning, group: ProjectionGroup, layers: int, targets: int, fp8: bool, long: bool
) -> tuple[Launcher, int]:
    """Returns the launcher, and the number of blocks of output columns of all targets."""
    options = tuning.expand_options(long, tuning.num_splits(group.in_features))
    constants = {**_constants(group, layers, targets, fp8), "OUT_FEATURES": group.out_features}
    blocks = sum(-(-features // options["BLOCK_N"]) for features in group.out_features)
    return with_constants(expand_kernel, **constants, FP8_SCALES=FP8_SCALES, **options), blocks


def _constants(group: ProjectionGroup, layers: int, targets: int, fp8: bool) -> dict[str, Any]:
    return {"LAYERS": layers, "TARGETS": targets, "GROUP": group.targets, "FP8": fp8, **LAYOUT}


@triton.jit(do_not_specialize=["layer", "max_rows"])
def shrink_kernel(
    x_ptr,
    arena_ptr,
    sums_ptr,
    offsets_ptr,
    ranks_ptr,
    tiles_ptr,
    count_ptr,
    rows_ptr,
    layer,
    max_rows,
    sums_stride,
    x_stride,
    LAYERS: tl.constexpr,
    TARGETS: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK_TILE: tl.constexpr,
    MAX_TILES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    SPLITS: tl.constexpr,
    PART_UNIT: tl.constexpr,
    SERIAL: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NARROW_ROWS: tl.constexpr,
    NARROW_K: tl.constexpr,
):
    """Computes sums[part, target, rows, ranks] = x[rows, part of K] A^T for one (target, shrink tile, part), tile after
    tile. With SERIAL, one program computes all parts and stores their sum at part 0."""
    index = tl.program_id(0)
    target = 0
    for i in tl.static_range(len(GROUP)):
        target = tl.where(index == i, GROUP[i], target)
    for number in range(tl.program_id(1), tl.load(count_ptr), tl.num_programs(1)):
        item = tiles_ptr + number * 4
        adapter_slot, first, count, first_rank = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        entry = (adapter_slot * LAYERS + layer) * TARGETS + target
        rank = tl.load(ranks_ptr + entry)
        if first_rank < rank:
            r = first_rank + tl.arange(0, RANKS)
            live = r < rank
            tile = tl.load(offsets_ptr + entry * (2 * MAX_TILES) + r // RANK_TILE, mask=live, other=0).to(tl.int64)
            weights = arena_ptr + tile * (2 * ALIGN if FP8 else ALIGN) + (r % RANK_TILE) * IN_FEATURES
            sums = sums_ptr + (index * max_rows + first).to(tl.int64) * sums_stride + r
            part_stride = (len(GROUP) * max_rows).to(tl.int64) * sums_stride
            rows = rows_ptr + first
            if NARROW_ROWS < ROWS and count <= NARROW_ROWS:
                _shrink_tile(
                    x_ptr, rows, count, weights, live, sums, x_stride, sums_stride, part_stride,
                    FP8, IN_FEATURES, SPLITS, PART_UNIT, SERIAL, RANKS, NARROW_ROWS, NARROW_K,
                )  # fmt: skip
            else:
                _shrink_tile(
                    x_ptr, rows, count, weights, live, sums, x_stride, sums_stride, part_stride,
                    FP8, IN_FEATURES, SPLITS, PART_UNIT, SERIAL, RANKS, ROWS, BLOCK_K,
                )  # fmt: skip


@triton.jit
def _shrink_tile(
    x_ptr,
    rows_ptr,
    count,
    weights,
    live,
    sums,
    x_stride,
    sums_stride,
    part_stride,
    FP8: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    SPLITS: tl.constexpr,
    PART_UNIT: tl.constexpr,
    SERIAL: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes one tile of `shrink_kernel`. `weights` [RANKS] points to rows of A, and `sums` [RANKS] to the first
    row's sums."""
    PART: tl.constexpr = ((IN_FEATURES + SPLITS * PART_UNIT - 1) // (SPLITS * PART_UNIT)) * PART_UNIT
    m = tl.arange(0, ROWS)
    x_row = x_ptr + tl.load(rows_ptr + m, mask=m < count, other=0).to(tl.int64) * x_stride
    first_part = tl.program_id(2)
    total = tl.zeros((RANKS, ROWS), dtype=tl.float32)
    for part in range(first_part, SPLITS if SERIAL else first_part + 1):
        product = tl.zeros((RANKS, ROWS), dtype=tl.float32)
        for first_k in range(part * PART, tl.minimum(part * PART + PART, IN_FEATURES), BLOCK_K):
            k = first_k + tl.arange(0, BLOCK_K)
            a = tl.load(weights[:, None] + k[None, :], mask=live[:, None] & (k < IN_FEATURES)[None, :], other=0)
            x = tl.load(x_row[None, :] + k[:, None], mask=(m < count)[None, :] & (k < IN_FEATURES)[:, None], other=0.0)
            if FP8:
                a = _from_e4m3(a, x.dtype)
            product = tl.dot(a, x, product, input_precision="ieee")
        total += product
    place = sums[:, None] + m[None, :] * sums_stride + first_part * part_stride
    tl.store(place, total, mask=live[:, None] & (m < count)[None, :])


@triton.jit
def _from_e4m3(bits, dtype: tl.constexpr):
    """Converts the bits of e4m3 numbers to 1/256 of the numbers, exactly, so that products stay in fp16's range. The
    bits are moved to fp32's fields, which lowers the exponent by 120, and multiplied by 2^112. Expand's factors make up
    for the 1/256 of A and of B."""
    moved = (bits.to(tl.int32) << 20) & -0x78100000  # keep the extended sign bit and the seven bits from bit 20 on
    return (moved.to(tl.float32, bitcast=True) * 2.0**112).to(dtype)


@triton.jit(do_not_specialize=["layer", "max_rows"])
def expand_kernel(
    out_ptr,
    arena_ptr,
    factors_ptr,
    sums_ptr,
    offsets_ptr,
    ranks_ptr,
    tiles_ptr,
    count_ptr,
    rows_ptr,
    layer,
    max_rows,
    sums_stride,
    out_stride,
    LAYERS: tl.constexpr,
    TARGETS: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK_TILE: tl.constexpr,
    MAX_TILES: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    FP8_SCALES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes out[rows, columns] += (sum of the parts) B for one block of columns of one target, tile after tile."""
    block = tl.program_id(0)
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
    n = within * BLOCK_N + tl.arange(0, BLOCK_N)
    RANKS: tl.constexpr = 2 * RANK_TILE if FP8 else RANK_TILE  # instructions take 8-bit weights 32 ranks at a time
    r = tl.arange(0, RANKS)
    part_stride = (len(GROUP) * max_rows).to(tl.int64) * sums_stride
    for number in range(tl.program_id(1), tl.load(count_ptr), tl.num_programs(1)):
        item = tiles_ptr + number * 4
        adapter_slot, first, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        entry = (adapter_slot * LAYERS + layer) * TARGETS + target
        tiles = offsets_ptr + entry * (2 * MAX_TILES) + MAX_TILES
        rank = tl.load(ranks_ptr + entry)
        for done in range(0, tl.where(rank > 0, count, 0), ROWS):
            m = done + tl.arange(0, ROWS)
            mask = (n < features)[:, None] & (m < count)[None, :]
            row = tl.load(rows_ptr + first + m, mask=m < count, other=0).to(tl.int64)
            place = out_ptr + row[None, :] * out_stride + (column + n)[:, None]
            base = tl.load(place, mask=mask, other=0.0)
            sums = sums_ptr + (index * max_rows + first + m).to(tl.int64) * sums_stride
            total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
            for first_rank in range(0, rank, RANKS):
                live = first_rank + r < rank
                tile = tl.load(tiles + (first_rank + r) // RANK_TILE, mask=live, other=0).to(tl.int64)
                weights = arena_ptr + tile * (2 * ALIGN if FP8 else ALIGN) + r % RANK_TILE * features
                weights += 4 * FP8_SCALES if FP8 else 0
                b_mask = live[:, None] & (n < features)[None, :]
                b = tl.load(weights[:, None] + n[None, :], mask=b_mask, other=0)
                shrunk = tl.zeros((RANKS, ROWS), dtype=tl.float32)
                for part in tl.static_range(SPLITS):
                    shrunk += tl.load(
                        sums[None, :] + (first_rank + r)[:, None] + part * part_stride,
                        mask=live[:, None] & (m < count)[None, :],
                        other=0.0,
                    )
                if FP8:
                    b = _from_e4m3(b, base.dtype)
                    factor = tl.load(factors_ptr + tile * (ALIGN // 2) + r % RANK_TILE, mask=live, other=0.0)
                    shrunk *= (factor * 65536.0)[:, None]
                total = tl.dot(tl.trans(b), shrunk.to(b.dtype), total, input_precision="ieee")
            tl.store(place, (base.to(tl.float32) + total).to(base.dtype), mask=mask)
