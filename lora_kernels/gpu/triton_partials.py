"""Stores and merges, in their order, the partial results of contexts cut into splits: for each query row and head the
largest score, the sum of exponentials, and their sum times values, in fp32 (Flash-Decoding, Dao et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_context import add_sinks, block_width

MERGE_WARPS, MERGE_SPLITS = 1, 8


@dataclass(frozen=True, slots=True)
class Partials:
    """Memory for partial results. A *part* is one split of one query row."""

    totals: Tensor
    """fp32 [num_parts, heads, head_dim]. Sums of exponentials times values."""
    stats: Tensor
    """fp32 [num_parts, heads, 2]. (largest score in base 2, sum of exponentials)."""


def make_partials(num_parts: int, heads: int, head_dim: int, device: torch.device) -> Partials:
    return Partials(
        totals=torch.empty(num_parts, heads, head_dim, dtype=torch.float32, device=device),
        stats=torch.empty(num_parts, heads, 2, dtype=torch.float32, device=device),
    )


def merge(
    out: Tensor,
    partials: Partials,
    rows: Tensor,
    count: Tensor,
    programs: int,
    max_splits: int,
    sinks: Tensor | None = None,
) -> None:
    """Compute rows of `out` [num_rows, heads, head_dim] from the partial results of up to `max_splits` splits.

    Args:
        rows: int32 [at least count, 3]. (row, its first part, number of its parts). Rows of one part stay as they are.
        programs: number of programs per head, which walk over the list.
        sinks: see `Scores`.
    """
    _, heads, head_dim = out.shape
    widths = {"MAX_SPLITS": max_splits, "SPLITS": min(max_splits, MERGE_SPLITS), "BLOCK_D": block_width(head_dim)}
    sizes = {"HAS_SINKS": sinks is not None, "HEADS": heads, "HEAD_DIM": head_dim, **widths}
    kernel = with_constants(merge_kernel, **sizes, num_warps=MERGE_WARPS)
    read = partials.totals, partials.stats, rows, count, partials.stats if sinks is None else sinks
    kernel((programs, heads), out, *read, out.stride(0))


@triton.jit
def store_partial(
    totals_ptr,
    stats_ptr,
    part,
    head,
    mask,
    peak,
    norm,
    total,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the softmax state of a tile's rows (`peak` and `norm` [BLOCK_M], `total` [BLOCK_M, BLOCK_D]) in `Partials`,
    as parts `part` of heads `head`, both [BLOCK_M]. Rows that `mask` excludes are not stored."""
    d = tl.arange(0, BLOCK_D)
    place = part.to(tl.int64) * HEADS + head
    tl.store(totals_ptr + place[:, None] * HEAD_DIM + d[None, :], total, mask=mask[:, None] & (d < HEAD_DIM)[None, :])
    tl.store(stats_ptr + place * 2, peak, mask=mask)
    tl.store(stats_ptr + place * 2 + 1, norm, mask=mask)


@triton.jit(do_not_specialize=["count_ptr"])
def merge_kernel(
    out_ptr,
    totals_ptr,
    stats_ptr,
    rows_ptr,
    count_ptr,
    sinks_ptr,
    out_stride,
    HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute one head of one row after the other as the mean of its parts, weighted by their sums of exponentials."""
    # `SPLITS` parts are read at a time: most rows have few, and larger tiles leave registers for fewer programs.
    head = tl.program_id(1)
    every, some = tl.arange(0, MAX_SPLITS), tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    column = head * HEAD_DIM + d
    for entry in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
        row = tl.load(rows_ptr + entry * 3).to(tl.int64)
        first = tl.load(rows_ptr + entry * 3 + 1).to(tl.int64)
        count = tl.load(rows_ptr + entry * 3 + 2)
        if count > 1:
            highest = tl.max(
                tl.load(stats_ptr + ((first + every) * HEADS + head) * 2, mask=every < count, other=float("-inf")), 0
            )
            total, norm = tl.zeros((BLOCK_D,), dtype=tl.float32), 0.0
            for done in range(0, count, SPLITS):
                split = done + some
                place = (first + split) * HEADS + head
                here = split < count
                peaks = tl.load(stats_ptr + place * 2, mask=here, other=float("-inf"))
                norms = tl.load(stats_ptr + place * 2 + 1, mask=here, other=0.0)
                weights = tl.exp2(peaks - highest)
                mask = here[:, None] & (d < HEAD_DIM)[None, :]
                totals = tl.load(totals_ptr + place[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
                total += tl.sum(totals * weights[:, None], 0)
                norm += tl.sum(norms * weights, 0)
            if HAS_SINKS:
                norm = add_sinks(norm, highest, sinks_ptr, head, True)
            result = (total / norm).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * out_stride + column, result, mask=d < HEAD_DIM)
