"""Paged attention of prompt chunks. A tile holds all query heads of one KV head for some rows of one chunk; a fixed
number of programs walk a list of items (triton_prefill_plan.py) whose length is in device memory."""

from __future__ import annotations

import triton
import triton.language as tl

from lora_kernels.backend import AttentionBatch
from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_context import AttentionCall, add_sinks, attend_blocks
from lora_kernels.gpu.triton_partials import merge, store_partial
from lora_kernels.gpu.triton_prefill_plan import ITEM, PrefillPlan, PrefillTuning

MERGE_PROGRAMS = 64
"""Maximum number of rows that are merged side by side. Programs walk over the rows beyond it."""


def prefill(call: AttentionCall, batch: AttentionBatch, plan: PrefillPlan, tuning: PrefillTuning) -> None:
    """Compute attention of a batch's chunks into the rows of `call.out` that `plan` covers, and merge splits."""
    programs = min(tuning.programs, len(plan.items) * call.kv.shape[3])
    kernel = with_constants(
        prefill_kernel,
        **prefill_constants(call.group, tuning),
        **call.constants,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    kernel(
        (programs,),
        call.out,
        call.query,
        call.kv,
        plan.partials.totals,
        plan.partials.stats,
        plan.items if call.kv_scales is None else call.kv_scales,
        plan.items if call.scores.sinks is None else call.scores.sinks,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        plan.items,
        plan.counts,
        programs,
        call.base2_scale,
        call.window or 0,
        *call.strides,
        batch.block_tables.stride(0),
    )
    if len(plan.rows):
        most = min(MERGE_PROGRAMS, len(plan.rows))
        merge(call.out, plan.partials, plan.rows, plan.counts[1:], most, tuning.max_splits, call.scores.sinks)


def prefill_constants(group: int, tuning: PrefillTuning) -> dict[str, int]:
    """Return the constants of `prefill_kernel` besides `AttentionCall.constants`."""
    return {"BLOCK_M": tuning.height(group), "BLOCK_N": tuning.block_n}


@triton.jit
def find_item(turn, programs, items_ptr, count_ptr, KV_HEADS: tl.constexpr, AGAIN: tl.constexpr):
    """Return the address of the work item that this program computes in a turn, the KV head, and whether there is one
    (the first item's address if not)."""
    # Every second turn goes backwards, because items become shorter. With AGAIN, numbers are read from memory once
    # more; otherwise the compiler would keep them in registers that the loops need.
    place = tl.program_id(0)
    number = tl.where(turn % 2 == 0, turn * programs + place, (turn + 1) * programs - 1 - place)
    exists = number < tl.load(count_ptr, volatile=AGAIN) * KV_HEADS
    number = tl.where(exists, number, 0)
    return items_ptr + number // KV_HEADS * ITEM, number % KV_HEADS, exists


@triton.jit
def find_rows(
    item_ptr,
    kv_head,
    query_starts_ptr,
    stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Return where a tile's numbers lie in a tensor [num_rows, heads, head_dim] with a row stride of `stride`, which
    rows of the tile exist, and which of its numbers do. For AGAIN, see `find_item`."""
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    sequence = tl.load(item_ptr, volatile=AGAIN)
    row_start = tl.load(query_starts_ptr + sequence)
    length = tl.load(query_starts_ptr + sequence + 1) - row_start
    row = tl.load(item_ptr + 1, volatile=AGAIN) + m // GROUP
    here = (m < BLOCK_M // GROUP * GROUP) & (row < length)
    column = (kv_head * GROUP + m % GROUP) * HEAD_DIM
    place = ((row_start + row).to(tl.int64) * stride + column)[:, None] + d[None, :]
    return place, here, here[:, None] & (d < HEAD_DIM)[None, :]


@triton.jit(do_not_specialize=["query_starts_ptr", "contexts_ptr", "tables_ptr", "programs", "window", "table_stride"])
def prefill_kernel(
    out_ptr,
    query_ptr,
    kv_ptr,
    totals_ptr,
    stats_ptr,
    scales_ptr,
    sinks_ptr,
    query_starts_ptr,
    contexts_ptr,
    tables_ptr,
    items_ptr,
    count_ptr,
    programs,
    scale,
    window,
    query_stride,
    out_stride,
    page_stride,
    side_stride,
    table_stride,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    CAP: tl.constexpr,
    FP8: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute splits of tiles, each for one KV head, into `out_ptr` or, if the tile is split, as partial results, item
    after item. `scale` is for base-2 exponentials, `programs` the number of programs."""
    # Numbers that are the same for all items are computed again for each, as there are no registers to keep them in.
    for turn in tl.range(0, tl.cdiv(tl.load(count_ptr) * KV_HEADS, programs), disable_licm=True):
        item_ptr, kv_head, exists = find_item(turn, programs, items_ptr, count_ptr, KV_HEADS, False)
        sequence = tl.load(item_ptr, mask=exists, other=0)
        first = tl.load(item_ptr + 1, mask=exists, other=0)
        begin = tl.load(item_ptr + 2, mask=exists, other=0)
        end = tl.load(item_ptr + 3, mask=exists, other=0)
        if begin < end:
            m = tl.arange(0, BLOCK_M)
            length = tl.load(query_starts_ptr + sequence + 1) - tl.load(query_starts_ptr + sequence)
            start = tl.load(contexts_ptr + sequence) - length + first
            read, _, mask = find_rows(
                item_ptr, kv_head, query_starts_ptr, query_stride, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, False
            )
            query = tl.load(query_ptr + read, mask=mask, other=0.0)
            key_scale = scale
            if FP8:
                query = query.to(tl.float16)
            if HAS_SCALES:
                key_scale *= tl.load(scales_ptr + kv_head)

            peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
            norm = tl.zeros((BLOCK_M,), dtype=tl.float32)
            total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
            # Every row sees the tokens opened:closed. The tokens before them contain the window's start, and those
            # after them the diagonal.
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
                    key_scale,
                    page_stride,
                    side_stride,
                    EDGE=piece != 1,
                    HAS_WINDOW=HAS_WINDOW,
                    CAP=CAP,
                    KV_HEADS=KV_HEADS,
                    HEAD_DIM=HEAD_DIM,
                    BLOCK_SIZE=BLOCK_SIZE,
                    BLOCK_N=BLOCK_N,
                    BLOCK_D=BLOCK_D,
                )
            item_ptr, kv_head, _ = find_item(turn, programs, items_ptr, count_ptr, KV_HEADS, True)
            if HAS_SCALES:
                total *= tl.load(scales_ptr + KV_HEADS + kv_head)
            written, here, mask = find_rows(
                item_ptr, kv_head, query_starts_ptr, out_stride, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, True
            )
            head = kv_head * GROUP + m % GROUP
            part = tl.load(item_ptr + 4)
            if part >= 0:
                parts = part + m // GROUP * tl.load(item_ptr + 5)
                heads = KV_HEADS * GROUP
                store_partial(totals_ptr, stats_ptr, parts, head, here, peak, norm, total, heads, HEAD_DIM, BLOCK_D)
            else:
                if HAS_SINKS:
                    norm = add_sinks(norm, peak, sinks_ptr, head, here)
                # Rows that pad the tile may have seen no token, and their norm is then 0.
                result = total / tl.where(norm > 0, norm, 1.0)[:, None]
                tl.store(out_ptr + written, result.to(out_ptr.dtype.element_ty), mask=mask)
