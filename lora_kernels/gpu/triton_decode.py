"""Paged attention of single query rows. Contexts are split, depending only on their lengths, so that few sequences fill
a GPU (Flash-Decoding, Dao et al. 2023), and the query heads of a KV head share a tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_context import MIN_DOT, AttentionCall, add_sinks, attend_blocks, seqs_width
from lora_kernels.gpu.triton_partials import Partials, make_partials, merge, store_partial
from lora_kernels.tuning import require_power_of_two


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Parameters that an autotuner may vary. The first three decide a result's bits, so an engine keeps them for life.
    Raises ValueError if one of those three breaks its constraint; the others are not checked."""

    block_n: int = 64
    """Tokens that a program reads at once, a power of two."""
    split_tokens: int = 512
    """Contexts of at most this many visible tokens are not split; a multiple of `block_n`."""
    max_splits: int = 32
    """Maximum splits of a context, a power of two. Contexts longer than `split_tokens * max_splits` get longer splits,
    not more."""
    num_warps: int = 4
    num_stages: int = 4
    """`num_warps` and `num_stages`: launch options; a program has `num_stages - 1` blocks of K and V in shared
    memory."""
    programs: int = 264
    """Number of programs launched, as many as fit on the device at the same time."""

    def __post_init__(self) -> None:
        for name in ("block_n", "max_splits"):
            require_power_of_two(name, getattr(self, name))
        if self.split_tokens < 1 or self.split_tokens % self.block_n:
            raise ValueError(f"split_tokens must be a multiple of block_n ({self.block_n}), not {self.split_tokens}")


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """The memory that decoding writes besides its output. It is allocated once, because captured graphs hold its
    addresses."""

    partials: Partials
    """Room for `max_splits` parts of each of `max_seqs` sequences."""
    rows: Tensor
    """int32 [max_seqs, 3], the `rows` argument of `merge`: the sequences whose context is split."""
    count: Tensor
    """int32 [1]. Number of these sequences."""


def make_workspace(
    max_seqs: int, heads: int, head_dim: int, tuning: DecodeTuning, device: torch.device
) -> DecodeWorkspace:
    """Allocate a workspace, which takes `workspace_bytes` of the device's memory."""
    return DecodeWorkspace(
        partials=make_partials(max_seqs * tuning.max_splits, heads, head_dim, device),
        rows=torch.empty(max_seqs, 3, dtype=torch.int32, device=device),
        count=torch.empty(1, dtype=torch.int32, device=device),
    )


def workspace_bytes(max_seqs: int, heads: int, head_dim: int, tuning: DecodeTuning) -> int:
    return max_seqs * (tuning.max_splits * heads * (head_dim + 2) + 3) * 4 + 4


def decode(
    call: AttentionCall,
    query_starts: Tensor,
    contexts: Tensor,
    block_tables: Tensor,
    workspace: DecodeWorkspace,
    tuning: DecodeTuning,
    *,
    may_split: bool = True,
) -> None:
    """Compute attention into the first rows of `call.out`, where row i is the newest token of sequence i. Context 0 is
    padding, whose row becomes zero; sequences without exactly one row, which come last, are skipped.

    Args:
        query_starts, contexts, block_tables: see `AttentionBatch`.
        may_split: False if no row sees more than `tuning.split_tokens` tokens.
    """
    num_seqs, kv_heads = len(contexts), call.kv.shape[3]
    kernel = with_constants(
        decode_kernel,
        **decode_constants(num_seqs, call.group, tuning),
        **call.constants,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    kernel(
        (min(tuning.programs, num_seqs * kv_heads * tuning.max_splits),),
        call.out,
        call.query,
        call.kv,
        workspace.partials.totals,
        workspace.partials.stats,
        workspace.rows,
        workspace.count,
        # Not read without scales or sinks. Its address is always aligned, as that of `contexts` is not: one kernel
        # serves all.
        workspace.partials.stats if call.kv_scales is None else call.kv_scales,
        workspace.partials.stats if call.scores.sinks is None else call.scores.sinks,
        query_starts,
        contexts,
        block_tables,
        call.base2_scale,
        call.window or 0,
        num_seqs,
        *call.strides,
        block_tables.stride(0),
    )
    if may_split:
        merge(
            call.out,
            workspace.partials,
            workspace.rows,
            workspace.count,
            num_seqs,
            tuning.max_splits,
            call.scores.sinks,
        )


def decode_constants(num_seqs: int, group: int, tuning: DecodeTuning) -> dict[str, int]:
    """Return the compile-time constants of `decode_kernel` that are not in `AttentionCall.constants`."""
    return {
        "SEQS": seqs_width(num_seqs),
        "BLOCK_M": max(MIN_DOT, triton.next_power_of_2(group)),
        "BLOCK_N": tuning.block_n,
        "SPLIT_TOKENS": tuning.split_tokens,
        "MAX_SPLITS": tuning.max_splits,
    }


@triton.jit
def split_size(span, BLOCK_N: tl.constexpr, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Return the tokens per split of a context of `span` visible tokens, in whole blocks. The last split may be
    shorter."""
    splits = tl.minimum(tl.maximum(tl.cdiv(span, SPLIT_TOKENS), 1), MAX_SPLITS)
    return tl.maximum(tl.cdiv(tl.cdiv(span, splits), BLOCK_N), 1) * BLOCK_N


@triton.jit(do_not_specialize=["query_starts_ptr", "contexts_ptr", "tables_ptr", "window", "num_seqs", "table_stride"])
def decode_kernel(
    out_ptr,
    query_ptr,
    kv_ptr,
    totals_ptr,
    stats_ptr,
    rows_ptr,
    count_ptr,
    scales_ptr,
    sinks_ptr,
    query_starts_ptr,
    contexts_ptr,
    tables_ptr,
    scale,
    window,
    num_seqs,
    query_stride,
    out_stride,
    page_stride,
    side_stride,
    table_stride,
    SEQS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
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
    """Compute attention of the query heads of one KV head over one split, item after item, into `out_ptr` or, of
    several splits, as partial results whose entries for `merge` are in `rows_ptr`. `scale` is for base-2
    exponentials."""
    index = tl.arange(0, SEQS)
    starts = tl.load(query_starts_ptr + index, mask=index < num_seqs, other=0)
    lengths = tl.load(query_starts_ptr + index + 1, mask=index < num_seqs, other=0) - starts
    spans = tl.load(contexts_ptr + index, mask=index < num_seqs, other=0)
    if HAS_WINDOW:
        spans = tl.minimum(spans, window)
    sizes = split_size(spans, BLOCK_N, SPLIT_TOKENS, MAX_SPLITS)
    # A sequence without context also has one split, whose program writes zeros.
    splits = tl.where(lengths == 1, tl.maximum(tl.cdiv(spans, sizes), 1), 0)
    ends = tl.cumsum(splits, 0)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, tl.sum((splits > 1).to(tl.int32), 0))
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    mask = (m < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    for item in range(tl.program_id(0), tl.sum(splits, 0) * KV_HEADS, tl.num_programs(0)):
        # Neighbouring programs read different heads of the same tokens, and so together read whole pages in order.
        kv_head = item % KV_HEADS
        done = ends <= item // KV_HEADS
        sequence = tl.sum(done.to(tl.int32), 0)
        split = item // KV_HEADS - tl.sum(tl.where(done, splits, 0), 0)
        context = tl.load(contexts_ptr + sequence)
        span = context
        if HAS_WINDOW:
            span = tl.minimum(context, window)
        size = split_size(span, BLOCK_N, SPLIT_TOKENS, MAX_SPLITS)
        begin = context - span + split * size
        end = tl.minimum(begin + size, context)
        row = sequence.to(tl.int64)
        head = kv_head * GROUP + m
        column = head[:, None] * HEAD_DIM + d[None, :]
        query = tl.load(query_ptr + row * query_stride + column, mask=mask, other=0.0)
        key_scale = scale
        if FP8:
            query = query.to(tl.float16)
        if HAS_SCALES:
            key_scale *= tl.load(scales_ptr + kv_head)
        peak, norm, total = attend_blocks(
            query,
            tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32),
            tl.zeros((BLOCK_M,), dtype=tl.float32),
            tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32),
            kv_ptr + kv_head * HEAD_DIM,
            tables_ptr + row * table_stride,
            begin,
            end,
            tl.zeros((BLOCK_M,), dtype=tl.int32) + end - 1,
            window,
            key_scale,
            page_stride,
            side_stride,
            EDGE=True,
            HAS_WINDOW=False,
            CAP=CAP,
            KV_HEADS=KV_HEADS,
            HEAD_DIM=HEAD_DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
        )
        if HAS_SCALES:
            total *= tl.load(scales_ptr + KV_HEADS + kv_head)
        if span <= size:
            if HAS_SINKS:
                norm = add_sinks(norm, peak, sinks_ptr, head, m < GROUP)
            result = total / tl.where(norm > 0, norm, 1.0)[:, None]
            tl.store(out_ptr + row * out_stride + column, result.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            part = sequence * MAX_SPLITS + split + m * 0
            heads = KV_HEADS * GROUP
            store_partial(totals_ptr, stats_ptr, part, head, m < GROUP, peak, norm, total, heads, HEAD_DIM, BLOCK_D)
            if kv_head == 0 and split == 0:
                entry_ptr = rows_ptr + 3 * tl.sum((done & (splits > 1)).to(tl.int32), 0)
                tl.store(entry_ptr, sequence)
                tl.store(entry_ptr + 1, sequence * MAX_SPLITS)
                tl.store(entry_ptr + 2, tl.cdiv(span, size))
