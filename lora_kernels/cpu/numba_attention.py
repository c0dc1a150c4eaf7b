"""Paged attention on the CPU in one pass over the pages in place, with softmax online in fp32 over tiles of about
`TILE` tokens, for the items of numba_attention_plan.py. The query heads of a KV head are additional rows."""

from __future__ import annotations

import math
from functools import cache

from numba import carray, float32

from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import Format, load_as, size_of, store_as
from lora_kernels.cpu.numba_attention_plan import CACHE_LINE, TILE, AttentionArguments
from lora_kernels.cpu.openmp import ITEM, THREAD, Kernel
from lora_kernels.cpu.products import MAX_ROWS, dot_rows, mix_rows
from lora_kernels.cpu.simd import LANES

NEVER = float32(-math.inf)


@cache
def make_kernel(fmt: Format) -> Kernel:
    """Compile the kernel for tensors in `fmt`. All backends of the process share it."""

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

    return Kernel(attend, AttentionArguments)


@simd.inlined
def _attend_item(block, fmt, scratch, item, following):
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
        # A sink is a score that has been seen before all others, and whose weight is that of no value.
        simd.write_f32(maxima + 4 * m, simd.read_f32(block.sinks + 4 * head) if block.sinks else NEVER)
        simd.write_f32(totals + 4 * m, float32(1 if block.sinks else 0))

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


@simd.inner
def _start_row(block, fmt, row, head, query, sums):
    """Copy one head of a query row, scaled, in fp32 to the address `query`, and zeroe the row's sums at `sums`."""
    scale = simd.splat(block.scale)
    source = block.query + row * block.query_row + head * block.query_head
    for d in range(0, block.dims, LANES):
        part = load_as(fmt, source + size_of(fmt) * d, block.dims - d)
        simd.store(query + 4 * d, simd.mul(scale, part))
        simd.store(sums + 4 * d, simd.splat(float32(0)))


@simd.inner
def _prefetch(block, fmt, table, index, pages, offset):
    """Prefetch one head's K or V in page number `index` of those listed at `table`, from byte `offset` on. Does nothing
    unless `index` is below `pages`."""
    # The hardware cannot predict scattered pages, and the core stalls on too many prefetches at once.
    if index < pages:
        start = block.kv + simd.read_i32(table + 4 * index) * block.page + offset
        for token in range(block.block_size):
            for byte in range(0, block.dims * size_of(fmt), CACHE_LINE):
                simd.prefetch(start + token * block.token + byte)


@simd.inner
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
    """Attend from `rows` of an item's rows, from number `r` on, to the tile of a KV head's tokens that begins at
    position `tile`, whose pages are listed at `table`. Update the rows' `sums`, `maxima` and `totals`."""
    # A row is a query head of a query row; `first` is the position of the item's first one. The pages at `ahead`, those
    # of the next tile, are prefetched meanwhile.
    simd.stay_apart()
    size = block.block_size
    step = max(1, TILE // size)
    row_bytes = 4 * (-(-block.dims // LANES) * LANES)
    score_bytes = 4 * (-(-step * size // LANES) * LANES)
    seen = min(step * size, first + (r + rows - 1) // block.group + 1 - tile)
    if seen <= 0:  # only later rows of the item see this tile
        return
    for t in range(0, seen, size):
        _prefetch(block, fmt, ahead, t // size, ahead_pages, ahead_offset)
        key = block.kv + simd.read_i32(table + 4 * (t // size)) * block.page + head_offset
        count = min(size, seen - t)
        dot_rows(fmt, rows, query, row_bytes, key, block.token, count, block.dims, scores + 4 * t, score_bytes, 0)
    for i in range(rows):
        position = first + (r + i) // block.group - tile
        low = min(seen, max(0, position - block.window + 1))
        if block.cap > 0:
            _cap(scores + i * score_bytes, seen, block.cap)
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


@simd.inner
def _cap(scores, stop, cap):
    """Replace each of one row's scores s [stop] by cap * tanh(s / cap), where tanh(x) is 1 - 2 / (exp(2x) + 1)."""
    simd.stay_apart()
    for t in range(0, 4 * stop, 4 * LANES):
        grown = simd.exp(simd.mul(simd.load(scores + t), simd.splat(float32(2) / cap)))
        share = simd.div(simd.splat(float32(-2) * cap), simd.add(grown, simd.splat(float32(1))))
        simd.store(scores + t, simd.add(share, simd.splat(cap)))


@simd.inner
def _soften(scores, low, high, stop, maximum, total):
    """Turn one row's scores [stop] into exp(score - running maximum) in place, 0 outside [low, high), and update the
    row's maximum and total. Return a vector of the factor by which the row's earlier sums must be multiplied."""
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
