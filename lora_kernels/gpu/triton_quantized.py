"""Kernels of quantised weights on a GPU (after the papers of AWQ and Marlin): products with a few rows, their sums, and
dequantised rows. Codes lie in words of 16 bits, [spans, features, 32]."""

from __future__ import annotations

import triton
import triton.language as tl

# A span is 32 inputs for each code that a word holds, and code p of word j belongs to input 32 p + j of its span, so
# that shifts turn words into neighbouring inputs. With OFFSETS 0 a weight is `scale * (code - 2^(BITS - 1))`, with 1
# `scale * (code + offset)`, with 2 `scale * code + offset`, in fp32 and rounded to the dtype of activations.

LANES = tl.constexpr(32)
"""Words that a feature has in a span."""


@triton.jit
def _group_numbers(group_scales_ptr, group_offsets_ptr, group, BITS: tl.constexpr, OFFSETS: tl.constexpr):
    """Return the fp32 scale and offset of the groups at the index `group`, in the form that `_weights` takes: a weight
    is `scale * (2^BITS + code) + offset`."""
    scale = tl.load(group_scales_ptr + group).to(tl.float32)
    if OFFSETS == 0:
        return scale, -scale * ((1 << BITS) + (1 << (BITS - 1)))
    offset = tl.load(group_offsets_ptr + group).to(tl.float32)
    if OFFSETS == 1:
        offset = offset * scale
    return scale, offset - scale * (1 << BITS)


@triton.jit
def _weights(words, scale, offset, PART: tl.constexpr, BITS: tl.constexpr):
    """Return the weights of code `PART` of each word, fp32. `scale` and `offset` are those of `_group_numbers`."""
    # A code in the upper bits of a mantissa makes 2^BITS + code in fewer instructions than a conversion.
    mantissa = (words.to(tl.int32) << (23 - BITS - PART * BITS)) & (((1 << BITS) - 1) << (23 - BITS))
    number = (mantissa | ((127 + BITS) << 23)).to(tl.float32, bitcast=True)
    return number * scale[:, None] + offset[:, None]


@triton.jit
def product_kernel(
    x_ptr,
    packed_ptr,
    group_scales_ptr,
    group_offsets_ptr,
    bias_ptr,
    out_ptr,
    rows,
    features,
    width,
    spans,
    x_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Compute out[row, feature] of one tile. With SPLITS above 1, computes the sum over one split of the inputs
    instead: `out` is then fp32 [SPLITS, rows, features], and bias is not added."""
    PARTS: tl.constexpr = 16 // BITS
    SPAN: tl.constexpr = PARTS * LANES
    SHARING: tl.constexpr = (GROUP if GROUP < SPAN else SPAN) // LANES  # parts whose inputs share a scale
    row_tiles = tl.cdiv(rows, BLOCK_M)
    n = tl.program_id(0) // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    lanes = tl.arange(0, LANES)
    inside = tl.minimum(n, features - 1)
    each = tl.cdiv(spans, SPLITS)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for span in range(split * each, tl.minimum(split * each + each, spans)):
        words = tl.load(packed_ptr + (span * features + inside)[:, None] * LANES + lanes[None, :])
        for shared in tl.static_range(PARTS // SHARING):
            group = (span * SPAN + shared * SHARING * LANES) // GROUP * features + inside
            scale, offset = _group_numbers(group_scales_ptr, group_offsets_ptr, group, BITS, OFFSETS)
            for number in tl.static_range(SHARING):
                part = shared * SHARING + number
                start = span * SPAN + part * LANES
                mask = (m < tl.where(start < width, rows, 0))[None, :]
                x = tl.load(x_ptr + m[None, :] * x_stride + (start + lanes)[:, None], mask=mask, other=0.0)
                weights = _weights(words, scale, offset, part, BITS).to(x.dtype)
                total = tl.dot(weights, x, total, input_precision="ieee")
    if HAS_BIAS and SPLITS == 1:
        total += tl.load(bias_ptr + inside).to(tl.float32)[:, None]
    at = out_ptr + (split * rows + m).to(tl.int64)[:, None] * features + n[None, :]
    tl.store(at, tl.trans(total).to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < features)[None, :])


@triton.jit
def split_sum_kernel(
    split_sums_ptr,
    bias_ptr,
    out_ptr,
    rows,
    features,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute out[row, feature], the sum of [SPLITS, rows, features] in fp32 and bias, for a block of features."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < features
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(split_sums_ptr + (split * rows + row).to(tl.int64) * features + n, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    at = out_ptr + row.to(tl.int64) * features + n
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dequantise_kernel(
    ids_ptr,
    packed_ptr,
    group_scales_ptr,
    group_offsets_ptr,
    out_ptr,
    first,
    count,
    features,
    width,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute out[i, inputs of a span], [count, width]: the weights of feature `first + i` or, with ids, of feature
    `ids[i]`."""
    PARTS: tl.constexpr = 16 // BITS
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    span = tl.program_id(1)
    lanes = tl.arange(0, LANES)
    if HAS_IDS:  # noqa: SIM108
        n = tl.load(ids_ptr + i, mask=i < count, other=0).to(tl.int32)
    else:
        n = first + tl.minimum(i, count - 1)
    words = tl.load(packed_ptr + (span * features + n)[:, None] * LANES + lanes[None, :])
    for part in tl.static_range(PARTS):
        start = (span * PARTS + part) * LANES
        group = start // GROUP * features + n
        scale, offset = _group_numbers(group_scales_ptr, group_offsets_ptr, group, BITS, OFFSETS)
        weights = _weights(words, scale, offset, part, BITS)
        mask = (i < tl.where(start < width, count, 0))[:, None]
        at = out_ptr + i.to(tl.int64)[:, None] * width + (start + lanes)[None, :]
        tl.store(at, weights.to(out_ptr.dtype.element_ty), mask=mask)
