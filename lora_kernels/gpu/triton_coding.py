"""Codes rows of activations in 8 bits, with a scale for each row, and scales their products."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def code_rows_kernel(
    x_ptr, codes_ptr, row_scales_ptr, width, LARGEST: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute codes[row] = x[row] / scale, in e4m3 or with ROUNDS in int8, and the scale, for one row of `width`. A row
    of zeros has codes of 0; a number that is not finite makes the scale NaN."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * width
    peaks = tl.zeros([BLOCK], tl.float32)
    nothing = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + start + k, mask=k < width, other=0.0).to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(x))
        nothing += x - x
    scale = tl.maximum(tl.max(peaks, axis=0), 1e-30) / LARGEST
    tl.store(row_scales_ptr + row, scale + tl.sum(nothing, axis=0))
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)
        code = tl.load(x_ptr + start + k, mask=k < width, other=0.0).to(tl.float32) / scale
        if ROUNDS:
            code = tl.floor(code + 0.5)
        tl.store(codes_ptr + start + k, code.to(codes_ptr.dtype.element_ty), mask=k < width)


@triton.jit
def scale_sums_kernel(
    int_sums_ptr,
    row_scales_ptr,
    feature_scales_ptr,
    bias_ptr,
    out_ptr,
    features,
    out_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute out[row, feature] = sum * row's scale * feature's scale + bias, for a block of features."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < features
    total = tl.load(int_sums_ptr + row.to(tl.int64) * features + n, mask=mask, other=0).to(tl.float32) * tl.load(
        row_scales_ptr + row
    )
    total *= tl.load(feature_scales_ptr + n, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * out_stride + n, total.to(out_ptr.dtype.element_ty), mask=mask)
