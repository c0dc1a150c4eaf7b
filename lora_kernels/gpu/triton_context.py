"""Code that the decode and prefill kernels share: query rows walk over blocks of a paged context with an online softmax
(FlashAttention-2, Dao 2023), and find each block through the block table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.backend import Scores
from lora_kernels.tuning import LEAST_SEQS

LOG2_E = tl.constexpr(1.4426950408889634)
MIN_DOT = 16
"""Smallest tile that tensor cores multiply."""
FP8 = torch.float8_e4m3fn


def block_width(head_dim: int) -> int:
    """Return the columns of a tile of heads: a power of two, at least 16. Those beyond `head_dim` are unused zeros."""
    return max(MIN_DOT, triton.next_power_of_2(head_dim))


def seqs_width(num_seqs: int) -> int:
    """Return the number of sequences, a power of two, for which a kernel is compiled that serves `num_seqs`."""
    return max(LEAST_SEQS, triton.next_power_of_2(num_seqs))


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one layer's attention in one step. Kernels fill `out`."""

    out: Tensor
    query: Tensor
    """`out` and `query`: [num_rows, heads, head_dim]."""
    kv: Tensor
    """[num_pages, 2, block_size, kv_heads, head_dim], strided across pages, in the query's dtype or float8_e4m3fn."""
    scores: Scores
    window: int | None = None
    """Number of positions that a row sees, up to and including its own. None means all."""
    kv_scales: Tensor | None = None
    """fp32 [2, kv_heads]. Factors by which stored K and V are multiplied. None means 1."""

    @property
    def group(self) -> int:
        """The number of query heads per KV head (GQA)."""
        return self.query.shape[1] // self.kv.shape[3]

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """The strides, in elements, of query rows, `out` rows and pages, and the distance from K to V in a page."""
        return self.query.stride(0), self.out.stride(0), self.kv.stride(0), self.kv.stride(1)

    @property
    def base2_scale(self) -> float:
        """The factor of products of queries and keys for a softmax in base 2: the scores' scale times log2(e)."""
        return self.scores.scale * LOG2_E.value

    @property
    def constants(self) -> dict[str, int | bool | float]:
        """The compile-time constants that all attention kernels take."""
        _, _, block_size, kv_heads, head_dim = self.kv.shape
        return {
            "HAS_WINDOW": self.window is not None,
            "HAS_SCALES": self.kv_scales is not None,
            "HAS_SINKS": self.scores.sinks is not None,
            "CAP": self.scores.cap or 0.0,
            "FP8": self.kv.dtype == FP8,
            "GROUP": self.group,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_D": block_width(head_dim),
        }


@triton.jit
def find_pages(table_ptr, n, end, BLOCK_SIZE: tl.constexpr):
    """Return the page of each token position in `n`, from a sequence's block table; page 0 from `end` on."""
    return tl.load(table_ptr + n // BLOCK_SIZE, mask=n < end, other=0)


@triton.jit
def add_sinks(norm, peak, sinks_ptr, head, mask):
    """Add the exponentials of the sinks of heads `head` to `norm`, the sums of base-2 exponentials of rows with the
    largest score `peak`, and return the sums. All have one shape; rows that `mask` excludes may become anything."""
    return norm + tl.exp2(tl.load(sinks_ptr + head, mask=mask, other=0.0) * LOG2_E - peak)


@triton.jit
def attend_blocks(
    query,
    peak,
    norm,
    total,
    head_ptr,
    table_ptr,
    begin,
    end,
    position,
    window,
    scale,
    page_stride,
    side_stride,
    EDGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add context tokens `begin:end` to the softmax state of query rows, and return it: the largest score, the sum of
    base-2 exponentials, and their sum times values. CAP bounds scores (`Scores.cap`) unless it is 0."""
    # With EDGE, a row sees only tokens up to its `position`, which must be below `end` if the tokens do not fill whole
    # blocks, and with HAS_WINDOW the last `window`. Without EDGE, nothing is masked.
    step = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    # Look up pages one block ahead, because a load of K that waits for a load of its page cannot be pipelined.
    page = find_pages(table_ptr, begin + step, end, BLOCK_SIZE)
    for block in range(begin, end, BLOCK_N):
        n = block + step
        place = page.to(tl.int64) * page_stride + n % BLOCK_SIZE * (KV_HEADS * HEAD_DIM)
        page = find_pages(table_ptr, n + BLOCK_N, end, BLOCK_SIZE)
        key_ptr = head_ptr + place[:, None] + d[None, :]
        if EDGE or HEAD_DIM < BLOCK_D:
            mask = (d < HEAD_DIM)[None, :] & (n < end)[:, None]
            key = tl.load(key_ptr, mask=mask, other=0.0)
            value = tl.load(key_ptr + side_stride, mask=mask, other=0.0)
        else:
            key = tl.load(key_ptr)
            value = tl.load(key_ptr + side_stride)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
        if CAP > 0:
            # Of s in base 2: tanh(x) is 1 - 2 / (exp(2x) + 1), and exp2(s) is exp of the score.
            grown = tl.exp2(scores * (2 / CAP))
            scores = CAP * LOG2_E - (2 * CAP * LOG2_E) / (grown + 1.0)
        if EDGE:
            visible = n[None, :] <= position[:, None]
            if HAS_WINDOW:
                visible &= n[None, :] > position[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = new_peak
        if EDGE:
            # A row that has seen no token yet has peak -inf: avoid -inf - -inf in the exponent.
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(peak - shift)
        norm = norm * fade + tl.sum(weights, 1)
        total = tl.dot(weights.to(query.dtype), value.to(query.dtype), total * fade[:, None], input_precision="ieee")
        peak = new_peak
    return peak, norm, total
