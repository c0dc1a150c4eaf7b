"""Paged attention in one pass over the pages as they lie: nothing is gathered, and what is read is read once.

An *item* is what one thread does at a time: up to `ITEM_ROWS` query rows of one sequence, for one KV head or, when
there are sequences enough, for all of them, which then share the pages' cache lines. GQA: the query heads of a KV head
are rows like any others. A softmax goes online over tiles of about `TILE` tokens, in fp32.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, float32, njit
from torch import Tensor

from lora_kernels import simd
from lora_kernels.backend import AttentionBatch
from lora_kernels.formats import Format, load_as, size_of, store_as
from lora_kernels.openmp import ITEM, THREAD, TICKETS, Kernel
from lora_kernels.products import MAX_ROWS, dot_rows, mix_rows
from lora_kernels.simd import LANES

TILE = 64
"""Tokens a softmax step takes, in whole pages: enough to hide its fixed cost, few enough for the first cache."""
ITEM_ROWS = 16
"""Query rows of a prompt that read K and V together."""
CACHE_LINE = 64
NEVER = float32(-math.inf)
NO_WINDOW = 1 << 40

Int32Array = npt.NDArray[np.int32]


class Block(ctypes.Structure):
    """Addresses, and strides in bytes. `items`: int32 [num_items, 6], see `plan_items`; `scratch`: a piece a thread.
    `of_step`: all that differs from step to step, the same in all layers; see `Tape.renew`."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("num_items", "items", "query", "query_row", "query_head", "out")),
        *((name, ctypes.c_int64) for name in ("kv", "page", "side", "token", "head", "block_size")),
        *((name, ctypes.c_int64) for name in ("tables", "table", "heads", "group", "dims", "window")),
        *((name, ctypes.c_int64) for name in ("scratch", "scratch_bytes", "scratch_rows")),
        ("scale", ctypes.c_float),
    ]
    of_step = ("num_items", "items", "tables", "table", "scratch", "scratch_bytes", "scratch_rows")


class AttentionForm(NamedTuple):
    """What the layers that are alike have in common. `kv_shape`, `kv_stride`: of one layer's KV, in numbers."""

    heads: int
    kv_shape: tuple[int, ...]
    kv_stride: tuple[int, ...]
    number_bytes: int
    scale: float
    window: int | None


def make_kernel(fmt: Format) -> Kernel:
    def attend(pointer):
        block = carray(pointer, 1)[0]
        scratch = block.scratch + simd.take_ticket(pointer, THREAD) * block.scratch_bytes
        item = simd.take_ticket(pointer, ITEM)
        while item < block.num_items:
            following = simd.take_ticket(pointer, ITEM)
            _attend_item(
                block, fmt, scratch, block.items + 24 * item, block.items + 24 * min(following, block.num_items)
            )
            item = following

    return Kernel(attend, Block)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's argument block, and what it points at. Layers change three addresses of it."""

    block: Block
    items: Int32Array
    scratch: Tensor
    batch: AttentionBatch


def plan_attention(form: AttentionForm, batch: AttentionBatch) -> AttentionPlan:
    heads, (block_size, kv_heads, dims) = form.heads, form.kv_shape[2:]
    items = plan_items(batch, kv_heads, torch.get_num_threads())
    rows = max(MAX_ROWS, int((items[:, 2] * items[:, 5]).max()) * heads // kv_heads)
    scratch = torch.empty(torch.get_num_threads(), _scratch_bytes(rows, dims, block_size), dtype=torch.uint8)
    page, side, token, head = (stride * form.number_bytes for stride in form.kv_stride[:4])
    block = Block(
        num_items=len(items),
        items=items.ctypes.data,
        page=page,
        side=side,
        token=token,
        head=head,
        block_size=block_size,
        tables=batch.block_tables.data_ptr(),
        table=batch.block_tables.stride(0) * 4,
        heads=heads,
        group=heads // kv_heads,
        dims=dims,
        window=form.window or NO_WINDOW,
        scratch=scratch.data_ptr(),
        scratch_bytes=scratch.shape[1],
        scratch_rows=rows,
        scale=form.scale,
    )
    return AttentionPlan(block, items, scratch, batch)


def plan_items(batch: AttentionBatch, kv_heads: int, threads: int) -> Int32Array:
    """int32 [num_items, 6]: sequence, first query row, query rows, position of the first, first KV head, KV heads.

    The longest come first, so that no thread is left with one at the end.
    """
    starts = np.asarray(batch.host_query_starts)
    contexts = np.asarray(batch.host_context_lens)
    lengths = np.diff(starts)
    counts = -(-lengths // ITEM_ROWS)
    sequence = np.repeat(np.arange(len(lengths)), counts)
    row = (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * ITEM_ROWS
    rows = np.minimum(ITEM_ROWS, lengths[sequence] - row)
    position = contexts[sequence] - lengths[sequence] + row
    items = np.stack([sequence, starts[sequence] + row, rows, position, 0 * row, 0 * row + kv_heads], axis=1)
    items = items[np.argsort(-(position + rows) * rows, kind="stable")].astype(np.int32)
    if len(items) >= 4 * threads:
        return items
    items = np.repeat(items, kv_heads, axis=0)
    items[:, 4] = np.arange(len(items)) % kv_heads
    items[:, 5] = 1
    return items


def _scratch_bytes(rows: int, dims: int, block_size: int) -> int:
    """Queries and sums of every row, scores of four, maximum and total of every row."""
    padded = -(-dims // LANES) * LANES
    tile = max(1, TILE // block_size) * block_size + LANES
    return -(-4 * (2 * rows * padded + MAX_ROWS * tile + 2 * rows) // CACHE_LINE) * CACHE_LINE


@njit
def _attend_item(block, fmt, scratch, item, following):
    simd.stay_apart()
    sequence, first_row, num_rows = simd.read_i32(item), simd.read_i32(item + 4), simd.read_i32(item + 8)
    first, first_head, num_heads = simd.read_i32(item + 12), simd.read_i32(item + 16), simd.read_i32(item + 20)
    row_bytes = 4 * (-(-block.dims // LANES) * LANES)
    per_head = num_rows * block.group
    sums = scratch + block.scratch_rows * row_bytes
    maxima = sums + block.scratch_rows * row_bytes
    totals = maxima + 4 * block.scratch_rows
    scores = totals + 4 * block.scratch_rows

    for m in range(per_head * num_heads):
        row = first_row + m % per_head // block.group
        head = (first_head + m // per_head) * block.group + m % block.group
        _start_row(block, fmt, row, head, scratch + m * row_bytes, sums + m * row_bytes)
        simd.write_f32(maxima + 4 * m, NEVER)
        simd.write_f32(totals + 4 * m, float32(0))

    table = block.tables + sequence * block.table
    last_page = (first + num_rows - 1) // block.block_size
    step = max(1, TILE // block.block_size)
    for page in range(max(0, first - block.window + 1) // block.block_size, last_page + 1, step):
        ahead_table, ahead_page, ahead_last, ahead_head = table, page + step, last_page, first_head
        if ahead_page > last_page and following < block.items + 24 * block.num_items:
            ahead_table = block.tables + simd.read_i32(following) * block.table
            ahead_first, ahead_head = simd.read_i32(following + 12), simd.read_i32(following + 16)
            ahead_page = max(0, ahead_first - block.window + 1) // block.block_size
            ahead_last = (ahead_first + simd.read_i32(following + 8) - 1) // block.block_size
        ahead_pages = max(0, min(step, ahead_last - ahead_page + 1))
        for head in range(num_heads):
            for r in range(0, per_head, MAX_ROWS):
                m = head * per_head + r
                _attend_tile(
                    block,
                    fmt,
                    table + 4 * page,
                    (first_head + head) * block.head,
                    page * block.block_size,
                    first,
                    r,
                    min(MAX_ROWS, per_head - r),
                    scratch + m * row_bytes,
                    sums + m * row_bytes,
                    maxima + 4 * m,
                    totals + 4 * m,
                    scores,
                    ahead_table + 4 * ahead_page,
                    0 if r else ahead_pages,
                    (ahead_head + head) * block.head,
                )

    for m in range(per_head * num_heads):
        row = first_row + m % per_head // block.group
        head = (first_head + m // per_head) * block.group + m % block.group
        share = simd.splat(float32(1) / simd.read_f32(totals + 4 * m))
        to = block.out + (row * block.heads + head) * block.dims * size_of(fmt)
        for d in range(0, block.dims, LANES):
            part = simd.mul(share, simd.load(sums + m * row_bytes + 4 * d))
            store_as(fmt, to + size_of(fmt) * d, part, block.dims - d)


@njit
def _start_row(block, fmt, row, head, query, sums):
    """Copies a query, scaled, and clears its sums."""
    scale = simd.splat(block.scale)
    source = block.query + row * block.query_row + head * block.query_head
    for d in range(0, block.dims, LANES):
        part = load_as(fmt, source + size_of(fmt) * d, block.dims - d)
        simd.store(query + 4 * d, simd.mul(scale, part))
        simd.store(sums + 4 * d, simd.splat(float32(0)))


@njit
def _prefetch(block, fmt, table, index, pages, offset):
    """One head's K or V of a page of the next tile: pages are scattered, and the processor cannot guess the next one.

    A little at a time: more than a core may have under way would make it wait.
    """
    if index < pages:
        start = block.kv + simd.read_i32(table + 4 * index) * block.page + offset
        for token in range(block.block_size):
            for byte in range(0, block.dims * size_of(fmt), CACHE_LINE):
                simd.prefetch(start + token * block.token + byte)


@njit
def _attend_tile(
    block,
    fmt,
    table,
    head_offset,
    tile,
    first,
    r,
    rows,
    query,
    sums,
    maxima,
    totals,
    scores,
    ahead,
    ahead_pages,
    ahead_offset,
):
    """Rows r to r + rows of a KV head, rows of one position side by side, against the pages from `table` on."""
    simd.stay_apart()
    size = block.block_size
    step = max(1, TILE // size)
    row_bytes = 4 * (-(-block.dims // LANES) * LANES)
    score_bytes = 4 * (-(-step * size // LANES) * LANES)
    seen = min(step * size, first + (r + rows - 1) // block.group + 1 - tile)
    if seen <= 0:  # a tile for later rows of the item
        return
    for t in range(0, seen, size):
        _prefetch(block, fmt, ahead, t // size, ahead_pages, ahead_offset)
        key = block.kv + simd.read_i32(table + 4 * (t // size)) * block.page + head_offset
        count = min(size, seen - t)
        dot_rows(fmt, rows, query, row_bytes, key, block.token, count, block.dims, scores + 4 * t, score_bytes, 0)
    for i in range(rows):
        position = first + (r + i) // block.group - tile
        low = min(seen, max(0, position - block.window + 1))
        keep = _soften(
            scores + i * score_bytes, low, max(low, min(seen, position + 1)), seen, maxima + 4 * i, totals + 4 * i
        )
        for d in range(0, row_bytes, 4 * LANES):
            place = sums + i * row_bytes + d
            simd.store(place, simd.mul(keep, simd.load(place)))
    for t in range(0, seen, size):
        _prefetch(block, fmt, ahead, t // size, ahead_pages, ahead_offset + block.side)
        value = block.kv + simd.read_i32(table + 4 * (t // size)) * block.page + head_offset + block.side
        count = min(size, seen - t)
        mix_rows(fmt, rows, scores + 4 * t, score_bytes, value, block.token, count, block.dims, sums, row_bytes, 0)


@njit
def _soften(scores, low, high, stop, maximum, total):
    """One row's scores [stop] become weights, 0 outside [low, high); returns the factor of what was summed before."""
    simd.stay_apart()
    for t in range(low):
        simd.write_f32(scores + 4 * t, NEVER)
    for t in range(high, -(-stop // LANES) * LANES):
        simd.write_f32(scores + 4 * t, NEVER)
    before = simd.read_f32(maximum)
    best = simd.splat(before)
    for t in range(0, 4 * stop, 4 * LANES):
        best = simd.maximum(simd.load(scores + t), best)
    top = simd.largest(best)
    shift = simd.splat(-top if top > NEVER else float32(0))
    summed = simd.splat(float32(0))
    for t in range(0, 4 * stop, 4 * LANES):
        weights = simd.exp(simd.add(simd.load(scores + t), shift))
        simd.store(scores + t, weights)
        summed = simd.add(summed, weights)
    keep = simd.exp(simd.add(simd.splat(before), shift))
    simd.write_f32(maximum, top)
    simd.write_f32(total, simd.read_f32(total) * simd.first(keep) + simd.total(summed))
    return keep
