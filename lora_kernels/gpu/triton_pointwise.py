"""`Pointwise` in Triton, and the steps between a fused QKV projection and attention. Each call is one launch that reads
every number once and writes every number once (docs/kernels-step.md counts the bytes)."""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from lora_kernels.backend import KvCoding
from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_context import FP8
from lora_kernels.gpu.triton_kv import LARGEST
from lora_kernels.pointwise import GELU_CUBIC, GELU_LINEAR, BoundedSwiglu, QkNorms

NORM_NUMBERS = 512
"""Numbers of a row that one warp normalises."""
GLU_BLOCK = 1024
LINEAR, CUBIC = tl.constexpr(GELU_LINEAR), tl.constexpr(GELU_CUBIC)
HEAD_TILE = 8
"""Maximum heads of a row that one program processes."""


class TritonPointwise:
    """`Pointwise` for CUDA tensors; under Triton's interpreter also for CPU tensors."""

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float, factor: float = 1.0
    ) -> Tensor:
        """Add `delta` times `factor`, if given, to `x` in place. Return RMSNorm(x) * weight, a new tensor, or `x`:
        `Pointwise.add_norm`. Raises ValueError unless each row of `x` and `delta` is contiguous."""
        if delta is not None and factor != 1.0:
            delta = delta * factor
        if weight is None:
            return x if delta is None else x.add_(delta)
        if x.stride(1) != 1 or (delta is not None and delta.stride(1) != 1):
            raise ValueError(f"rows of strides {x.stride()} cannot be added to in place")
        rows, width = x.shape
        out = x.new_empty(rows, width)
        added = x if delta is None else delta
        kernel = with_constants(norm_kernel, HAS_DELTA=delta is not None, WIDTH=width, EPS=eps, **norm_tuning(width))
        kernel((rows,), x, added, weight, out, x.stride(0), added.stride(0))
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Apply the rotary embedding to `x` [num_rows, heads, head_dim] in place, see `Pointwise.rotate`. Raises
        ValueError unless each row's heads, `cos` and `sin` are contiguous."""
        _, heads, head_dim = x.shape
        if x.stride()[1:] != (head_dim, 1) or not (cos.is_contiguous() and sin.is_contiguous()):
            raise ValueError(f"heads of strides {x.stride()} cannot be turned in place")
        _launch_heads(x, heads, 0, cos, sin, None, x, cos, None)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, where `gate_up` [num_rows, 2 * width] holds gate and up side by side."""
        return _glu(gate_up, gelu=False)

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up, like `swiglu`, with the approximation of GELU by tanh."""
        return _glu(gate_up, gelu=True)

    def bounded_swiglu(self, gate_up: Tensor, bounds: BoundedSwiglu) -> Tensor:
        """Return the activation that `bounds` describes: `Pointwise.bounded_swiglu`."""
        return _glu(gate_up, gelu=False, bounds=bounds)


def _glu(gate_up: Tensor, *, gelu: bool, bounds: BoundedSwiglu | None = None) -> Tensor:
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    constants = {"GELU": gelu, **bound_constants(bounds), "WIDTH": width, "BLOCK": GLU_BLOCK}
    kernel = with_constants(glu_kernel, **constants, num_warps=4)
    kernel((rows, -(-width // GLU_BLOCK)), gate_up, out)
    return out


def bound_constants(bounds: BoundedSwiglu | None) -> dict[str, float]:
    """Return the constants of `glu_kernel` that say how gate and up are bounded. None means that they are not."""
    return {"LIMIT": bounds.limit if bounds else 0.0, "SLOPE": bounds.slope if bounds else 1.0}


def rotate_and_write(
    qkv: Tensor,
    kv: Tensor,
    kv_slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: QkNorms | None,
    coding: KvCoding | None = None,
) -> Tensor:
    """Apply norms (if any) and the rotary embedding, write K and V to `kv` at `kv_slots`, coded as `coding` says in
    FP8, and return the query [num_rows, heads, head_dim], a view of `qkv`. See `Backend.rotate_and_write`."""
    kv_heads, head_dim = kv.shape[3:]
    heads = qkv.view(len(qkv), -1, head_dim)
    num_query = heads.shape[1] - 2 * kv_heads
    if norms is not None and len(norms.query) != head_dim:  # heads of a row, which are several programs' here
        norms.apply(heads[:, : num_query + kv_heads], num_query)
        norms = None
    _launch_heads(heads, num_query, kv_heads, cos, sin, norms, kv, kv_slots, coding)
    return heads[:, :num_query]


def _launch_heads(
    x: Tensor,
    heads: int,
    kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    norms: QkNorms | None,
    kv: Tensor,
    slots: Tensor,
    coding: KvCoding | None,
) -> None:
    """Launch `heads_kernel` for `x` [num_rows, heads + 2 * kv_heads, head_dim]. Without KV heads, `kv` and `slots` may
    be any tensors of two or more dimensions, because the kernel does not read them."""
    rows, _, head_dim = x.shape
    kernel = with_constants(
        heads_kernel,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTARY=cos.shape[-1],
        BLOCK_SIZE=kv.shape[2] if kv_heads else 1,
        HAS_NORMS=norms is not None,
        FP8=kv.dtype == FP8,
        HAS_CODING=coding is not None,
        EPS=0.0 if norms is None else norms.eps,
        TILE=HEAD_TILE,
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
    )
    norm_weights = (cos, cos) if norms is None else (norms.query, norms.key)
    strides = (x.stride(0), kv.stride(0), kv.stride(1))
    tiles = -(-heads // HEAD_TILE) - 2 * (-kv_heads // HEAD_TILE)
    stored = (cos, cos) if coding is None else (coding.scales, coding.key_shift)
    kernel((rows, tiles), x, cos, sin, *norm_weights, kv, slots, *stored, *strides)


@cache
def norm_tuning(width: int) -> dict[str, int]:
    """Return options of `norm_kernel` that keep a row in registers: 16 numbers a thread, 1 to 16 warps."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // NORM_NUMBERS))}


@triton.jit
def norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    delta_stride,
    HAS_DELTA: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row: x += delta in place (with HAS_DELTA), out = RMSNorm(x) * weight."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    mask = n < WIDTH
    weight = tl.load(weight_ptr + n, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + n, mask=mask, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * delta_stride + n, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + row * x_stride + n, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + EPS)
    if weight_ptr.dtype.element_ty == x_ptr.dtype.element_ty:
        wide = (wide * scale).to(x.dtype).to(tl.float32)
    else:
        wide = wide * scale
    out = wide * weight
    tl.store(out_ptr + row * WIDTH + n, out.to(x.dtype), mask=mask)


@triton.jit
def glu_kernel(
    gate_up_ptr,
    out_ptr,
    GELU: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one block of columns of one row: out = silu(gate) * up, or with GELU, gelu(gate) * up, or with a LIMIT
    that is not 0, `BoundedSwiglu`."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < WIDTH
    place = gate_up_ptr + row * 2 * WIDTH + n
    gate = tl.load(place, mask=mask, other=0.0)
    up = tl.load(place + WIDTH, mask=mask, other=0.0)
    wide, factor = gate.to(tl.float32), up.to(tl.float32)
    if LIMIT != 0.0:  # by comparisons, which leave NaN as it is
        wide = tl.where(wide > LIMIT, LIMIT, wide)
        factor = tl.where(factor > LIMIT, LIMIT, factor)
        factor = tl.where(factor < -LIMIT, -LIMIT, factor) + 1.0
    slope = wide * SLOPE
    if GELU:
        slope = wide * (LINEAR + CUBIC * wide * wide)
    active = (wide / (1.0 + tl.exp(-slope))).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + n, (active.to(tl.float32) * factor).to(gate.dtype), mask=mask)


@triton.jit
def heads_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    kv_ptr,
    slots_ptr,
    scales_ptr,
    shift_ptr,
    x_stride,
    page_stride,
    side_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    FP8: tl.constexpr,
    HAS_CODING: tl.constexpr,
    EPS: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
):
    """Process a tile of one row's heads, all query, key or value heads. Apply the norm and the rotary embedding to
    query and key heads. Store query heads in place, others at the row's slot, if not negative."""
    # A head is two halves, of which the numbers at the same place are rotated together. Each half begins with half of
    # the head's first ROTARY numbers, which alone are rotated.
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    QUERY_TILES: tl.constexpr = (HEADS + TILE - 1) // TILE
    KV_TILES: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    is_query = tile < QUERY_TILES
    is_value = tile >= QUERY_TILES + KV_TILES
    first = tl.where(is_query, 0, tl.where(is_value, HEADS + KV_HEADS, HEADS))
    count = tl.where(is_query, HEADS, KV_HEADS)
    within = tl.where(is_query, tile, tl.where(is_value, tile - QUERY_TILES - KV_TILES, tile - QUERY_TILES))

    half = tl.arange(0, HALF)
    head = within * TILE + tl.arange(0, TILE)
    dims = half < HEAD_DIM // 2
    mask = (head < count)[:, None] & dims[None, :]
    dim_low = half
    dim_high = half + HEAD_DIM // 2
    if ROTARY < HEAD_DIM:
        dim_low = half + tl.where(half < ROTARY // 2, 0, ROTARY // 2)
        dim_high = half + tl.where(half < ROTARY // 2, ROTARY // 2, HEAD_DIM // 2)
    column_low = head[:, None] * HEAD_DIM + dim_low[None, :]
    column_high = head[:, None] * HEAD_DIM + dim_high[None, :]
    place = x_ptr + row * x_stride + first * HEAD_DIM
    low = tl.load(place + column_low, mask=mask, other=0.0)
    high = tl.load(place + column_high, mask=mask, other=0.0)

    if not is_value:
        wide_low = low.to(tl.float32)
        wide_high = high.to(tl.float32)
        if HAS_NORMS:
            norm_ptr = tl.where(is_query, query_norm_ptr, key_norm_ptr)
            squares = tl.sum(wide_low * wide_low, 1) + tl.sum(wide_high * wide_high, 1)
            scale = tl.rsqrt(squares / HEAD_DIM + EPS)[:, None]
            norm_low = tl.load(norm_ptr + dim_low, mask=dims, other=0.0).to(tl.float32)[None, :]
            norm_high = tl.load(norm_ptr + dim_high, mask=dims, other=0.0).to(tl.float32)[None, :]
            wide_low *= scale
            wide_high *= scale
            if query_norm_ptr.dtype.element_ty == x_ptr.dtype.element_ty:
                wide_low = wide_low.to(low.dtype).to(tl.float32)
                wide_high = wide_high.to(low.dtype).to(tl.float32)
            wide_low = (wide_low * norm_low).to(low.dtype).to(tl.float32)
            wide_high = (wide_high * norm_high).to(low.dtype).to(tl.float32)
        angle = row * ROTARY + half
        turns = half < ROTARY // 2
        cos_low = tl.load(cos_ptr + angle, mask=turns, other=1.0)[None, :]
        cos_high = tl.load(cos_ptr + angle + ROTARY // 2, mask=turns, other=1.0)[None, :]
        sin_low = tl.load(sin_ptr + angle, mask=turns, other=0.0)[None, :]
        sin_high = tl.load(sin_ptr + angle + ROTARY // 2, mask=turns, other=0.0)[None, :]
        low = (wide_low * cos_low + wide_high * sin_low).to(low.dtype)
        high = (wide_high * cos_high + wide_low * sin_high).to(high.dtype)
    if is_query:
        tl.store(place + column_low, low, mask=mask)
        tl.store(place + column_high, high, mask=mask)
    elif KV_HEADS > 0:
        slot = tl.load(slots_ptr + row)
        if slot >= 0:
            page = kv_ptr + slot // BLOCK_SIZE * page_stride + slot % BLOCK_SIZE * (KV_HEADS * HEAD_DIM)
            page += tl.where(is_value, side_stride, 0)
            kept_low = low.to(tl.float32)
            kept_high = high.to(tl.float32)
            if HAS_CODING:
                if not is_value:
                    kept_low -= tl.load(shift_ptr + column_low, mask=mask, other=0.0)
                    kept_high -= tl.load(shift_ptr + column_high, mask=mask, other=0.0)
                factor_ptr = scales_ptr + tl.where(is_value, KV_HEADS, 0) + head
                factor = tl.load(factor_ptr, mask=head < KV_HEADS, other=1.0)[:, None]
                kept_low /= factor
                kept_high /= factor
            if FP8:
                kept_low = tl.clamp(kept_low, -LARGEST, LARGEST)
                kept_high = tl.clamp(kept_high, -LARGEST, LARGEST)
            tl.store(page + column_low, kept_low.to(kv_ptr.dtype.element_ty), mask=mask)
            tl.store(page + column_high, kept_high.to(kv_ptr.dtype.element_ty), mask=mask)
