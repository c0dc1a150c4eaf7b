"""Paged attention of prompt chunks: tall tiles of query rows attend to a ragged batch of paged contexts.

A tile holds all query heads of one KV head for some rows of one chunk. Blocks that all its rows see need no mask; the
other blocks, at the diagonal and at a window's start, are masked. The context of a chunk that makes too few tiles to
fill a GPU is split, as in decoding. The split depends only on the chunk itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.backend import AttentionBatch
from lora_kernels.gpu.triton_context import LOG2_E, MIN_DOT, AttentionCall, attend_blocks
from lora_kernels.gpu.triton_partials import Partials, make_partials, merge, store_partial
from lora_kernels.pinned import upload
from lora_kernels.tuning import require_power_of_two

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Parameters that an autotuner may vary. All but the launch options decide a result's bits, so an engine keeps them
    for life.

    Attributes:
        block_m: minimum number of (row, head of the group) pairs of a tile, a power of two; see `height`.
        block_n: tokens that a program reads at once, a power of two.
        fill: number of programs that fill the GPU; a chunk that makes fewer is split into up to this many.
        split_tokens: minimum tokens of every split but the last, rounded up to `block_n`.
        max_splits: maximum splits of a tile's context, a power of two.
        num_warps, num_stages: launch options.

    Raises:
        ValueError: `block_m`, `block_n` or `max_splits` is not a power of two; the message names it. The other values
            are not checked.
    """

    block_m: int = 128
    block_n: int = 64
    fill: int = 264
    split_tokens: int = 2048
    max_splits: int = 16
    num_warps: int = 8
    num_stages: int = 3

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "max_splits"):
            require_power_of_two(name, getattr(self, name))

    def height(self, group: int) -> int:
        """Returns the (row, head) pairs of a tile, a power of two, at least one query row of `group` heads."""
        return max(self.block_m, MIN_DOT, triton.next_power_of_2(group))


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The work items of a batch's chunks, for layers with the same window. Made once per step.

    Attributes:
        items: int32 [num_items, 6]. (sequence, tile's first query row in its chunk, first token, token after the last,
            part of the tile's first row, parts of a row); the part is -1 where the tile is not split.
        rows: int32 [num_merged, 3], the `rows` argument of `merge`. None means that no tile is split.
        partials: memory for the parts. None means that no tile is split.
    """

    items: Tensor
    rows: Tensor | None
    partials: Partials | None


def plan_prefill(batch: AttentionBatch, call: AttentionCall, tuning: PrefillTuning) -> PrefillPlan:
    """Cuts the chunks of `batch`, which follow its decodes, into tiles, and long contexts of short chunks into splits.

    Items that read most tokens come first, so that the last ones to start are short. Uploads without waiting.
    """
    tiles = _cut_tiles(batch, call, tuning)
    device, index = batch.query_starts.device, np.repeat(np.arange(len(tiles.chunk)), tiles.counts)
    split = np.arange(len(index)) - np.repeat(np.cumsum(tiles.counts) - tiles.counts, tiles.counts)
    begin = tiles.begin[index] + split * tiles.sizes[index]
    end = np.minimum(begin + tiles.sizes[index], tiles.end[index])
    part = np.where(tiles.counts > 1, tiles.parts, -1)[index]
    part += np.where(part >= 0, split, 0)
    items = np.stack([tiles.chunk[index], tiles.first[index], begin, end, part, tiles.counts[index]], axis=1)
    items = items[np.argsort(begin - end, kind="stable")]
    if (tiles.counts <= 1).all():
        return PrefillPlan(_upload(items, device), None, None)
    _, heads, head_dim = call.query.shape
    partials = make_partials(tiles.num_parts, heads, head_dim, device)
    return PrefillPlan(_upload(items, device), _upload(_merged_rows(batch, tiles), device), partials)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles of all chunks. Arrays are [num_tiles].

    Attributes:
        chunk: sequence of the tile.
        first, rows: first query row of the tile within its chunk, and number of query rows.
        begin, end: range of tokens that the tile reads.
        sizes, counts: tokens per split of the tile, and number of its splits.
        parts: first part of the tile's first row; a row has `counts` parts.
        num_parts: number of parts of all tiles.
    """

    chunk: Ints
    first: Ints
    rows: Ints
    begin: Ints
    end: Ints
    sizes: Ints
    counts: Ints
    parts: Ints
    num_parts: int


def _cut_tiles(batch: AttentionBatch, call: AttentionCall, tuning: PrefillTuning) -> _Tiles:
    tile_rows = tuning.height(call.group) // call.group
    lengths = np.diff(np.asarray(batch.host_query_starts, dtype=np.int64))
    contexts = np.asarray(batch.host_context_lens, dtype=np.int64)
    per_chunk = np.where(np.arange(len(lengths)) < batch.num_decodes, 0, -(-lengths // tile_rows))
    chunk = np.repeat(np.arange(len(lengths)), per_chunk)
    first = (np.arange(len(chunk)) - np.repeat(np.cumsum(per_chunk) - per_chunk, per_chunk)) * tile_rows
    rows = np.minimum(tile_rows, lengths[chunk] - first)
    end = contexts[chunk] - lengths[chunk] + first + rows
    begin = np.zeros_like(end) if call.window is None else np.maximum(end - rows - call.window + 1, 0)
    begin -= begin % tuning.block_n
    wanted = np.clip(tuning.fill // (per_chunk[chunk] * call.kv.shape[3]), 1, tuning.max_splits)
    sizes = np.maximum(-(-(end - begin) // wanted), tuning.split_tokens)
    sizes += -sizes % tuning.block_n
    counts = -(-(end - begin) // sizes)
    needed = rows * np.where(counts > 1, counts, 0)
    parts = np.cumsum(needed) - needed
    return _Tiles(chunk, first, rows, begin, end, sizes, counts, parts, int(needed.sum()))


def _merged_rows(batch: AttentionBatch, tiles: _Tiles) -> Ints:
    """Returns the `rows` argument of `merge` for all rows of the tiles that are split, int64 [num_merged, 3]."""
    split = tiles.counts > 1
    tile = np.repeat(np.arange(len(split)), np.where(split, tiles.rows, 0))
    row = np.concatenate([np.arange(count) for count in tiles.rows[split]])
    start = np.asarray(batch.host_query_starts, dtype=np.int64)[tiles.chunk[tile]] + tiles.first[tile]
    return np.stack([start + row, tiles.parts[tile] + row * tiles.counts[tile], tiles.counts[tile]], axis=1)


def _upload(table: Ints, device: torch.device) -> Tensor:
    return upload(table.astype(np.int32), device)


def prefill(call: AttentionCall, batch: AttentionBatch, plan: PrefillPlan, tuning: PrefillTuning) -> None:
    """Computes attention of a batch's chunks into the rows of `call.out` that `plan` covers, and merges splits."""
    partials = plan.partials
    prefill_kernel[(len(plan.items) * call.kv.shape[3],)](
        call.out,
        call.query,
        call.kv,
        call.out if partials is None else partials.totals,
        call.out if partials is None else partials.stats,
        plan.items if call.kv_scales is None else call.kv_scales,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        plan.items,
        call.scale * LOG2_E,
        call.window or 0,
        *call.strides,
        batch.block_tables.stride(0),
        **prefill_constants(call.group, partials is not None, tuning),
        **call.constants,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if partials is not None and plan.rows is not None:
        merge(call.out, partials, plan.rows, tuning.max_splits)


def prefill_constants(group: int, split: bool, tuning: PrefillTuning) -> dict[str, int | bool]:
    """Returns the constants of `prefill_kernel` besides `AttentionCall.constants`. `split`: if any tile is split."""
    return {"SPLIT": split, "BLOCK_M": tuning.height(group), "BLOCK_N": tuning.block_n}


@triton.jit(do_not_specialize=["query_starts_ptr", "contexts_ptr", "tables_ptr", "window", "table_stride"])
def prefill_kernel(
    out_ptr,
    query_ptr,
    kv_ptr,
    totals_ptr,
    stats_ptr,
    scales_ptr,
    query_starts_ptr,
    contexts_ptr,
    tables_ptr,
    items_ptr,
    scale,
    window,
    query_stride,
    out_stride,
    page_stride,
    side_stride,
    table_stride,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    FP8: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Computes one split of one tile for one KV head, into `out_ptr` or, if the tile is split, as partial results.
    `scale` is for base-2 exponentials."""
    kv_head = tl.program_id(0) % KV_HEADS
    item_ptr = items_ptr + tl.program_id(0) // KV_HEADS * 6
    sequence = tl.load(item_ptr)
    first = tl.load(item_ptr + 1)
    begin = tl.load(item_ptr + 2)
    end = tl.load(item_ptr + 3)
    row_start = tl.load(query_starts_ptr + sequence)
    length = tl.load(query_starts_ptr + sequence + 1) - row_start
    start = tl.load(contexts_ptr + sequence) - length + first

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    here = (m < BLOCK_M // GROUP * GROUP) & (first + m // GROUP < length)
    mask = here[:, None] & (d < HEAD_DIM)[None, :]
    row = (row_start + first + m // GROUP).to(tl.int64)[:, None]
    head = kv_head * GROUP + m % GROUP
    column = (head * HEAD_DIM)[:, None] + d[None, :]
    query = tl.load(query_ptr + row * query_stride + column, mask=mask, other=0.0)
    if FP8:
        query = query.to(tl.float16)
    if HAS_SCALES:
        scale *= tl.load(scales_ptr + kv_head)

    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    norm = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    # Every row sees the tokens opened:closed. The tokens before them contain the window's start, and those after them
    # the diagonal.
    opened = begin
    closed = begin + tl.maximum(tl.minimum(start + 1, end) - begin, 0) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        hidden = tl.maximum(start + BLOCK_M // GROUP - window - begin, 0)
        opened = tl.minimum(begin + tl.cdiv(hidden, BLOCK_N) * BLOCK_N, closed)
    for piece in tl.static_range(0 if HAS_WINDOW else 1, 3):
        peak, norm, total = attend_blocks(
            query,
            peak,
            norm,
            total,
            kv_ptr + kv_head * HEAD_DIM,
            tables_ptr + sequence.to(tl.int64) * table_stride,
            begin if piece == 0 else (opened if piece == 1 else closed),
            opened if piece == 0 else (closed if piece == 1 else end),
            start + m // GROUP,
            window,
            scale,
            page_stride,
            side_stride,
            EDGE=piece != 1,
            HAS_WINDOW=HAS_WINDOW,
            KV_HEADS=KV_HEADS,
            HEAD_DIM=HEAD_DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
        )
    if HAS_SCALES:
        total *= tl.load(scales_ptr + KV_HEADS + kv_head)
    part = tl.load(item_ptr + 4)
    if SPLIT and part >= 0:
        parts = part + m // GROUP * tl.load(item_ptr + 5)
        heads = KV_HEADS * GROUP
        store_partial(totals_ptr, stats_ptr, parts, head, here, peak, norm, total, heads, HEAD_DIM, BLOCK_D)
    else:
        # Rows that pad the tile may have seen no token, and their norm is then 0.
        result = total / tl.where(norm > 0, norm, 1.0)[:, None]
        tl.store(out_ptr + row * out_stride + column, result.to(out_ptr.dtype.element_ty), mask=mask)
