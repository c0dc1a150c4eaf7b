"""LoRA on a GPU, for any adapters with two launches per projection group, shrink and expand, or four with short and
long segments. A row has the same bits in every batch. docs/kernels-lora.md has the pictures and the numbers."""

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

# Weights are the left operand of a tensor-core product, so that one row costs little more than reading its adapter.
# With EARLY, programs begin while the kernel before them ends (programmatic dependent launch). Shrink lets expand begin
# only after it has waited for the base product itself, so that expand may read the base output first. Programs without
# a tile wait, too, because the next kernel waits only for the last one.

LAYOUT = {"ALIGN": ALIGN, "RANK_TILE": RANK_TILE, "MAX_TILES": MAX_TILES}


def add(out: Tensor, x: Tensor, prepared: TritonLora, layer: int, group: ProjectionGroup) -> None:
    """Add B A x of each row's own adapter to `out` [num_rows, sum(out_features)] in place: `Backend.add_lora`."""
    shrink(x, prepared, layer, group)
    expand(out, prepared, layer, group)


def shrink(x: Tensor, prepared: TritonLora, layer: int, group: ProjectionGroup) -> None:
    """Compute A x for `x` [num_rows, group.in_features], the first half of `add`, into `prepared.sums`. Raises
    ValueError if splits x targets exceed the parts of `prepared.sums`."""
    splits = prepared.tuning.num_splits(group.in_features)
    if splits * len(group.targets) > len(prepared.sums):
        raise ValueError(f"{group.name} needs {splits * len(group.targets)} sums a rank, not {len(prepared.sums)}")
    for tiles, long in ((prepared.lists.shrink, False), (prepared.lists.long_shrink, True)):
        if tiles.programs:
            parts = 1 if long else splits
            programs = prepared.tuning.num_programs(tiles.programs, len(group.targets) * parts)
            kernel = _shrink_launcher(prepared.tuning, group, *_table_shape(prepared), long)
            kernel(
                (len(group.targets), programs, parts),
                x,
                _stored(prepared),
                *_tables(prepared, tiles),
                layer,
                *prepared.sums.shape[1:],
                x.stride(0),
            )


def expand(out: Tensor, prepared: TritonLora, layer: int, group: ProjectionGroup) -> None:
    """Multiply `prepared.sums`, which `shrink` filled for the same layer and group, with B, and add the result to `out`
    [num_rows, sum(group.out_features)] in place. Raises ValueError if `out` has 2^31 numbers or more."""
    if out.numel() >= 1 << 31:
        raise ValueError(f"a step of {len(out)} rows is too large for LoRA of {out.shape[1]} outputs")
    for tiles, long in ((prepared.lists.rows, False), (prepared.lists.long_rows, True)):
        if tiles.programs:
            kernel, blocks = _expand_launcher(prepared.tuning, group, *_table_shape(prepared), long)
            kernel(
                (blocks, prepared.tuning.num_programs(tiles.programs, blocks)),
                out,
                _stored(prepared),
                prepared.arena.view(torch.float32) if prepared.table.fp8 else prepared.arena,
                *_tables(prepared, tiles),
                layer,
                *prepared.sums.shape[1:],
                out.stride(0),
            )


def _stored(prepared: TritonLora) -> Tensor:
    """Return the arena viewed in the dtype in which kernels read A and B tiles: int8 for FP8."""
    return prepared.arena.view(torch.int8) if prepared.table.fp8 else prepared.arena


def _tables(prepared: TritonLora, tiles: TileList) -> tuple[Tensor, ...]:
    """Return the tensors of sums, tables and tiles that both kernels take, in the order of their arguments."""
    table = prepared.table
    return (prepared.sums, table.offsets, table.ranks, tiles.tiles, tiles.count, prepared.rows)


def _table_shape(prepared: TritonLora) -> tuple[int, int, bool]:
    """Return the numbers of layers and targets of the adapter table, and whether adapters are in FP8."""
    _, layers, targets = prepared.table.ranks.shape
    return layers, targets, prepared.table.fp8


@cache
def _shrink_launcher(
    tuning: LoraTuning, group: ProjectionGroup, layers: int, targets: int, fp8: bool, long: bool
) -> Launcher:
    return with_constants(
        shrink_kernel,
        **_constants(tuning, group, layers, targets, fp8),
        IN_FEATURES=group.in_features,
        SPLITS=tuning.num_splits(group.in_features),
        PART_UNIT=PART_UNIT,
        **tuning.shrink_options(long, fp8),
    )


@cache
def _expand_launcher(
    tuning: LoraTuning, group: ProjectionGroup, layers: int, targets: int, fp8: bool, long: bool
) -> tuple[Launcher, int]:
    """Return the launcher, and the number of blocks of output columns of all targets."""
    options = tuning.expand_options(long, tuning.num_splits(group.in_features), fp8)
    constants = {**_constants(tuning, group, layers, targets, fp8), "OUT_FEATURES": group.out_features}
    blocks = sum(-(-features // options["BLOCK_N"]) for features in group.out_features)
    return with_constants(expand_kernel, **constants, FP8_SCALES=FP8_SCALES, **options), blocks


def _constants(tuning: LoraTuning, group: ProjectionGroup, layers: int, targets: int, fp8: bool) -> dict[str, Any]:
    shape = {"LAYERS": layers, "TARGETS": targets, "GROUP": group.targets, "FP8": fp8}
    return {**shape, **LAYOUT, **tuning.early_options()}


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
    EARLY: tl.constexpr,
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
    """Compute sums[part, target, rows, ranks] = x[rows, part of K] A^T for one (target, shrink tile, part), tile after
    tile. With SERIAL, one program computes all parts and stores their sum at part 0."""
    index = tl.program_id(0)
    target = 0
    for i in tl.static_range(len(GROUP)):
        target = tl.where(index == i, GROUP[i], target)
    r = tl.arange(0, RANKS)
    num_tiles = tl.load(count_ptr)
    item = tiles_ptr + tl.program_id(1) * 4
    adapter_slot, first, count, first_rank = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    for number in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        entry = (adapter_slot * LAYERS + layer) * TARGETS + target
        rank = tl.load(ranks_ptr + entry)
        # Loaded beside the rank, not after it: each load that waits for another takes some 0.6 us.
        tile = tl.load(offsets_ptr + entry * (2 * MAX_TILES) + (first_rank + r) // RANK_TILE).to(tl.int64)
        item = tiles_ptr + tl.minimum(number + tl.num_programs(1), num_tiles - 1) * 4
        next_slot, next_first, next_count, next_rank = (
            tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3),
        )  # fmt: skip
        weights = arena_ptr + tile * (2 * ALIGN if FP8 else ALIGN) + ((first_rank + r) % RANK_TILE) * IN_FEATURES
        sums = sums_ptr + (index * max_rows + first).to(tl.int64) * sums_stride + first_rank + r
        part_stride = (len(GROUP) * max_rows).to(tl.int64) * sums_stride
        rows = rows_ptr + first
        left = rank - first_rank
        if NARROW_ROWS < ROWS and count <= NARROW_ROWS:
            _shrink_tile(
                x_ptr, rows, count, weights, left, sums, x_stride, sums_stride, part_stride,
                FP8, EARLY, IN_FEATURES, SPLITS, PART_UNIT, SERIAL, RANKS, NARROW_ROWS, NARROW_K,
            )  # fmt: skip
        else:
            _shrink_tile(
                x_ptr, rows, count, weights, left, sums, x_stride, sums_stride, part_stride,
                FP8, EARLY, IN_FEATURES, SPLITS, PART_UNIT, SERIAL, RANKS, ROWS, BLOCK_K,
            )  # fmt: skip
        adapter_slot, first, count, first_rank = next_slot, next_first, next_count, next_rank
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _shrink_tile(
    x_ptr,
    rows_ptr,
    count,
    weights,
    ranks,
    sums,
    x_stride,
    sums_stride,
    part_stride,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    SPLITS: tl.constexpr,
    PART_UNIT: tl.constexpr,
    SERIAL: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute one tile of `shrink_kernel`. `ranks` is the adapter's rank minus the tile's first rank; if it is not
    positive, nothing is computed. `weights` [RANKS] points to rows of A, and `sums` [RANKS] to the first row's sums."""
    PART: tl.constexpr = ((IN_FEATURES + SPLITS * PART_UNIT - 1) // (SPLITS * PART_UNIT)) * PART_UNIT
    m = tl.arange(0, ROWS)
    x_row = x_ptr + tl.load(rows_ptr + m, mask=m < count, other=0).to(tl.int64) * x_stride
    live = tl.arange(0, RANKS) < ranks
    first_part = tl.program_id(2)
    width = tl.where(ranks > 0, PART, 0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((RANKS, ROWS), dtype=tl.float32)
    for part in range(first_part, SPLITS if SERIAL else first_part + 1):
        product = tl.zeros((RANKS, ROWS), dtype=tl.float32)
        for first_k in range(part * PART, tl.minimum(part * PART + width, IN_FEATURES), BLOCK_K):
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
    """Convert the bits of e4m3 numbers to 1/256 of the numbers, exactly, so that products stay in fp16's range.
    Expand's factors make up for it."""
    # The bits are moved to fp32's fields, which lowers the exponent by 120, and multiplied by 2^112.
    moved = (bits.to(tl.int32) << 20) & -0x78100000  # keep the extended sign bit and the seven bits from bit 20 on
    return (moved.to(tl.float32, bitcast=True) * 2.0**112).to(dtype)


@triton.jit
def find_block(block, GROUP: tl.constexpr, OUT_FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    """Return where number `block` of a group's blocks of BLOCK columns lies: the projection's index in GROUP, its
    target, its number of features and first column, and the number of the block in it."""
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
        blocks_before += (OUT_FEATURES[i] + BLOCK - 1) // BLOCK
        columns_before += OUT_FEATURES[i]
    return index, target, features, column, within


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
    EARLY: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    FP8_SCALES: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute out[rows, columns] += (sum of the parts) B for one block of columns of one target, tile after tile."""
    # The next tile's rank, rows and offsets are loaded early: each load that waits for another takes some 0.6 us.
    num_tiles = tl.load(count_ptr)
    step = tl.num_programs(1)
    item = tiles_ptr + tl.program_id(1) * 4
    adapter_slot, first, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    index, target, features, column, within = find_block(tl.program_id(0), GROUP, OUT_FEATURES, BLOCK_N)
    first_column = within * BLOCK_N
    out_ptr += column
    part_stride = (len(GROUP) * max_rows).to(tl.int64) * sums_stride
    r = tl.arange(0, RANKS)
    m = tl.arange(0, ROWS)
    has_tile = tl.program_id(1) < num_tiles  # memory beyond the list holds arbitrary numbers
    entry = (adapter_slot * LAYERS + layer) * TARGETS + target
    rank = tl.load(ranks_ptr + entry, mask=has_tile, other=0)
    tiles = offsets_ptr + entry * (2 * MAX_TILES) + MAX_TILES
    # Without ranks, the offset is 0, where the arena holds zeros.
    tile = tl.load(tiles + r // RANK_TILE, mask=r < tl.where(has_tile, RANKS, 0), other=0)
    row = tl.load(rows_ptr + first + m, mask=m < tl.where(has_tile, count, 0), other=0)
    item = tiles_ptr + tl.maximum(tl.minimum(tl.program_id(1) + step, num_tiles - 1), 0) * 4
    next_slot, next_first, next_count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    for number in range(tl.program_id(1), num_tiles, step):
        entry = (next_slot * LAYERS + layer) * TARGETS + target
        next_rank = tl.load(ranks_ptr + entry)
        next_tiles = offsets_ptr + entry * (2 * MAX_TILES) + MAX_TILES
        next_tile = tl.load(next_tiles + r // RANK_TILE)
        next_row = tl.load(rows_ptr + next_first + m, mask=m < next_count, other=0)
        item = tiles_ptr + tl.minimum(number + 2 * step, num_tiles - 1) * 4
        slot_after, first_after, count_after = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        sums = sums_ptr + (index * max_rows + first).to(tl.int64) * sums_stride
        for done in range(0, count, ROWS):
            following = done + ROWS + m
            row_after = tl.load(rows_ptr + first + following, mask=following < count, other=0)
            _expand_tile(
                out_ptr, row, done, count, arena_ptr, factors_ptr, tiles, tile, rank, sums, first_column, features,
                sums_stride, part_stride, out_stride,
                FP8, ALIGN, RANK_TILE, EARLY, FP8_SCALES, SPLITS, RANKS, ROWS, BLOCK_N,
            )  # fmt: skip
            row = row_after
        first, count, rank, tiles, tile, row = next_first, next_count, next_rank, next_tiles, next_tile, next_row
        next_slot, next_first, next_count = slot_after, first_after, count_after
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _expand_tile(
    out_ptr,
    row,
    done,
    count,
    arena_ptr,
    factors_ptr,
    tiles_ptr,
    tile,
    rank,
    sums_ptr,
    first_column,
    features,
    sums_stride,
    part_stride,
    out_stride,
    FP8: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK_TILE: tl.constexpr,
    EARLY: tl.constexpr,
    FP8_SCALES: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute rows `done` to `done` + ROWS of one tile, whose indices in the batch are `row` [ROWS]. Stores nothing if
    `rank` is 0. `tile` [RANKS] holds the offsets of the first ranks of B, `tiles_ptr` all."""
    r = tl.arange(0, RANKS)
    m = done + tl.arange(0, ROWS)
    n = first_column + tl.arange(0, BLOCK_N)
    mask = (n < features)[:, None] & (m < tl.where(rank > 0, count, 0))[None, :]
    place = row[None, :] * out_stride + n[:, None]  # fits 32 bits: see `expand`
    b = _load_b(arena_ptr, tile, r, r < rank, n, features, FP8, ALIGN, RANK_TILE, FP8_SCALES)
    # The base product is complete: shrink waited for it before it let this kernel begin.
    base = tl.load(out_ptr + place, mask=mask, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    sums = sums_ptr + m[None, :] * sums_stride + r[:, None]
    total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for first_rank in range(0, rank, RANKS):
        live = first_rank + r < rank
        shrunk = tl.zeros((RANKS, ROWS), dtype=tl.float32)
        for part in tl.static_range(SPLITS):
            part_sums = sums + first_rank + part * part_stride
            shrunk += tl.load(part_sums, mask=live[:, None] & (m < count)[None, :], other=0.0)
        following = first_rank + RANKS + r
        next_tile = tl.load(tiles_ptr + following // RANK_TILE, mask=following < rank, other=0)
        next_b = _load_b(arena_ptr, next_tile, r, following < rank, n, features, FP8, ALIGN, RANK_TILE, FP8_SCALES)
        if FP8:
            factors = factors_ptr + tile.to(tl.int64) * (ALIGN // 2) + r % RANK_TILE
            factor = tl.load(factors, mask=live, other=0.0)
            shrunk *= (factor * 65536.0)[:, None]
            b = _from_e4m3(b, base.dtype)
        total = tl.dot(tl.trans(b), shrunk.to(base.dtype), total, input_precision="ieee")
        tile, b = next_tile, next_b
    tl.store(out_ptr + place, (base.to(tl.float32) + total).to(base.dtype), mask=mask)


@triton.jit
def _load_b(
    arena_ptr,
    tile,
    r,
    live,
    n,
    features,
    FP8: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK_TILE: tl.constexpr,
    FP8_SCALES: tl.constexpr,
):
    """Load B [RANKS, BLOCK_N] at columns `n`: rank r of the tiles at the offsets `tile` [RANKS], 0 unless `live`."""
    weights = arena_ptr + tile.to(tl.int64) * (2 * ALIGN if FP8 else ALIGN) + r % RANK_TILE * features
    weights += 4 * FP8_SCALES if FP8 else 0
    return tl.load(weights[:, None] + n[None, :], mask=live[:, None] & (n < features)[None, :], other=0)
