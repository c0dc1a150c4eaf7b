"""Writes K and V of a step's rows to their pages, unchanged or as 8-bit floats (e4m3)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_context import FP8

LARGEST = tl.constexpr(448.0)
"""The largest e4m3 number. The format has no infinity, and larger numbers would become NaN."""


def write_kv(kv: Tensor, key: Tensor, value: Tensor, slots: Tensor, scales: Tensor | None = None) -> None:
    """Store `key` and `value` [num_rows, kv_heads, head_dim], each row contiguous, at `slots` (int64, `page *
    block_size + offset`, negative for padding) of one layer's KV. In FP8 they are divided by `scales`, fp32 [2,
    kv_heads], and clamped."""
    num_rows, kv_heads, head_dim = key.shape
    width = kv_heads * head_dim
    kernel = with_constants(
        write_kernel,
        FP8=kv.dtype == FP8,
        HAS_SCALES=scales is not None,
        BLOCK_SIZE=kv.shape[2],
        KV_HEADS=kv_heads,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    strides = (kv.stride(0), kv.stride(1), key.stride(0), value.stride(0))
    kernel((num_rows,), kv, key, value, slots, slots if scales is None else scales, *strides)


@triton.jit
def write_kernel(
    kv_ptr,
    key_ptr,
    value_ptr,
    slots_ptr,
    scales_ptr,
    page_stride,
    side_stride,
    key_stride,
    value_stride,
    FP8: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy K and V of one row to its slot, scaled and converted like `write_kv`. A negative slot is skipped."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        mask = column < WIDTH
        key = tl.load(key_ptr + row * key_stride + column, mask=mask)
        value = tl.load(value_ptr + row * value_stride + column, mask=mask)
        if HAS_SCALES:
            head = column // (WIDTH // KV_HEADS)
            key = key.to(tl.float32) / tl.load(scales_ptr + head, mask=mask, other=1.0)
            value = value.to(tl.float32) / tl.load(scales_ptr + KV_HEADS + head, mask=mask, other=1.0)
        if FP8:
            key = tl.clamp(key.to(tl.float32), -LARGEST, LARGEST)
            value = tl.clamp(value.to(tl.float32), -LARGEST, LARGEST)
        place = kv_ptr + slot // BLOCK_SIZE * page_stride + slot % BLOCK_SIZE * WIDTH + column
        tl.store(place, key.to(kv_ptr.dtype.element_ty), mask=mask)
        tl.store(place + side_stride, value.to(kv_ptr.dtype.element_ty), mask=mask)
