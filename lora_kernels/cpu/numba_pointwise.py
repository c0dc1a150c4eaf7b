"""`Pointwise` and the KV write in numba. Each call processes a row at a time, which stays in the first-level cache."""

from __future__ import annotations

import ctypes
import math
from functools import cache

import torch
from numba import carray, float32
from torch import Tensor

from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import F32, FORMATS, Format, load_as, rounded, size_of, store_as
from lora_kernels.cpu.openmp import ITEM, TICKETS, Kernel, Team
from lora_kernels.cpu.simd import LANES
from lora_kernels.pointwise import GELU_CUBIC, GELU_LINEAR, BoundedSwiglu, QkNorms

LINEAR, CUBIC = float32(GELU_LINEAR), float32(GELU_CUBIC)
ITEM_NUMBERS = 2048
"""About how many numbers the rows of one work item have together: computing them takes as long as starting a team."""


class NormBlock(ctypes.Structure):
    """Argument block of `Pointwise.add_norm`. The kernel adds delta times `factor` to x unless `delta` is 0, and writes
    the norm to `out` unless `weight` is 0. `wide` is 1 if only the weight is in fp32."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("rows", "item_rows", "x", "delta", "weight", "wide", "out", "width")),
        ("eps", ctypes.c_float),
        ("factor", ctypes.c_float),
    ]


class GluBlock(ctypes.Structure):
    """Argument block of the gated activations: gelu(gate) * up if `gelu` is 1, `BoundedSwiglu` with this `limit` and
    `slope` if `limit` is not 0, and otherwise silu(gate) * up."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("rows", "item_rows", "gate_up", "out", "width", "gelu")),
        *((name, ctypes.c_float) for name in ("limit", "slope")),
    ]


class RotateBlock(ctypes.Structure):
    """Argument block of the rotary embedding of the first `dims` dimensions of each head; strides are in bytes. Unless
    `query_norm` is 0, rows are normalised first: `queries` numbers in runs of `query_width`, then up to `width` in runs
    of `key_width`."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("rows", "item_rows", "x", "row", "head", "heads", "dims", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("query_norm", "key_norm", "queries", "width", "query_width")),
        *((name, ctypes.c_int64) for name in ("key_width", "wide")),
        ("eps", ctypes.c_float),
    ]


class WriteBlock(ctypes.Structure):
    """Argument block of the KV write, with strides in bytes. A row has `width` contiguous numbers of K and of V."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("rows", "item_rows", "key", "key_row", "value", "value_row", "width")),
        *((name, ctypes.c_int64) for name in ("kv", "page", "side", "token", "slots", "block_size")),
    ]


class NumbaPointwise:
    """`Pointwise` for CPU tensors, with numba kernels that a `Team` of threads runs in parallel. It also has the KV
    write. Kernels are compiled on first use, one for each operation and dtype."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._kernels: dict[tuple[str, torch.dtype], Kernel] = {}

    def add_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float, factor: float = 1.0
    ) -> Tensor:
        """Add `delta` times `factor`, if given, to `x` in place. Return RMSNorm(x) * weight, a new tensor, or `x`:
        `Pointwise.add_norm`. Raises ValueError unless `x` is contiguous."""
        if not x.is_contiguous():
            raise ValueError(f"rows of strides {x.stride()} cannot be added to in place")
        delta = None if delta is None else delta.contiguous()
        rows, width = x.shape
        if weight is None and delta is None:
            return x
        out = x if weight is None else self._team.empty(x.shape, x.dtype)
        norm = (0, 0) if weight is None else (weight.data_ptr(), int(weight.dtype != x.dtype))
        block = NormBlock(
            0, 0, rows, _item_rows(width), x.data_ptr(), 0 if delta is None else delta.data_ptr(), *norm,
            out.data_ptr(), width, eps, factor,
        )  # fmt: skip
        self._run("norm", x.dtype, block)
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, norms: QkNorms | None = None, query_heads: int = 0) -> None:
        """Apply norms, if given, and the rotary embedding to `x` [num_rows, heads, head_dim] in place, see
        `Pointwise.rotate`. The first `query_heads` heads are those of queries. Raises ValueError for tensors that are
        not contiguous."""
        rows, heads, head_dim = x.shape
        row, head, one = x.stride()
        dims = cos.shape[-1]
        if one != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
            raise ValueError(f"heads of strides {x.stride()} cannot be turned in place")
        size = x.element_size()
        block = RotateBlock(
            0, 0, rows, _item_rows(heads * dims), x.data_ptr(), row * size, head * size, heads, dims, cos.data_ptr(),
            sin.data_ptr(),
        )  # fmt: skip
        if norms is not None:
            if head != head_dim:
                raise ValueError(f"heads of strides {x.stride()} cannot be normalised together")
            block.query_norm, block.key_norm = norms.query.data_ptr(), norms.key.data_ptr()
            block.queries, block.width = query_heads * head_dim, heads * head_dim
            block.query_width, block.key_width = len(norms.query), len(norms.key)
            block.wide, block.eps = int(norms.query.dtype != x.dtype), norms.eps
        self._run("rotate", x.dtype, block)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, where `gate_up` [num_rows, 2 * width] holds gate and up side by side."""
        return self._glu(gate_up, 0)

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up, like `swiglu`, with the approximation of GELU by tanh."""
        return self._glu(gate_up, 1)

    def bounded_swiglu(self, gate_up: Tensor, bounds: BoundedSwiglu) -> Tensor:
        """Return the activation that `bounds` describes: `Pointwise.bounded_swiglu`."""
        return self._glu(gate_up, 0, bounds.limit, bounds.slope)

    def _glu(self, gate_up: Tensor, gelu: int, limit: float = 0.0, slope: float = 1.0) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._team.empty((rows, width), gate_up.dtype)
        block = GluBlock(0, 0, rows, _item_rows(width), gate_up.data_ptr(), out.data_ptr(), width, gelu, limit, slope)
        self._run("glu", gate_up.dtype, block)
        return out

    def write_kv(self, kv: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store K and V [num_rows, kv_heads, head_dim] at `slots` (`page * block_size + offset`) of one layer's KV."""
        key, value = _side_by_side(key), _side_by_side(value)
        size = kv.element_size()
        page, side, token = (stride * size for stride in kv.stride()[:3])
        width = key.shape[1] * key.shape[2]
        block = WriteBlock(
            0, 0, key.shape[0], _item_rows(2 * width), key.data_ptr(), key.stride(0) * size, value.data_ptr(),
            value.stride(0) * size, width, kv.data_ptr(), page, side, token, slots.data_ptr(), kv.shape[2],
        )  # fmt: skip
        self._run("write", kv.dtype, block)

    def kernel(self, name: str, dtype: torch.dtype) -> Kernel:
        """Return the kernel norm, rotate, glu or write (`name`) for tensors of `dtype`, compiled on first use."""
        if (name, dtype) not in self._kernels:
            self._kernels[name, dtype] = MAKERS[name](FORMATS[dtype])
        return self._kernels[name, dtype]

    def _run(self, name: str, dtype: torch.dtype, block: ctypes.Structure) -> None:
        self._team.run(self.kernel(name, dtype), block, -(-block.rows // block.item_rows))


def _side_by_side(heads: Tensor) -> Tensor:
    """Return [num_rows, heads, head_dim] with each row's heads contiguous, as a copy if necessary. Rows may have gaps
    between them."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()


def _item_rows(width: int) -> int:
    return max(1, ITEM_NUMBERS // width)


@cache
def _make_norm(fmt: Format) -> Kernel:
    def norm(pointer):
        block = carray(pointer, 1)[0]
        row_bytes = block.width * size_of(fmt)
        start = simd.take_ticket(pointer, ITEM) * block.item_rows
        while start < block.rows:
            for row in range(start, min(start + block.item_rows, block.rows)):
                delta = block.delta + row * row_bytes if block.delta else 0
                _norm_row(
                    fmt,
                    block.x + row * row_bytes,
                    delta,
                    block.weight,
                    block.wide,
                    block.out + row * row_bytes,
                    block.width,
                    block.eps,
                    block.factor,
                )
            start = simd.take_ticket(pointer, ITEM) * block.item_rows

    return Kernel(norm, NormBlock)


@cache
def _make_rotate(fmt: Format) -> Kernel:
    def rotate(pointer):
        block = carray(pointer, 1)[0]
        start = simd.take_ticket(pointer, ITEM) * block.item_rows
        while start < block.rows:
            for row in range(start, min(start + block.item_rows, block.rows)):
                if block.query_norm:
                    _norm_heads(block, fmt, block.x + row * block.row)
                for head in range(block.heads):
                    x = block.x + row * block.row + head * block.head
                    _rotate_head(
                        fmt, x, block.cos + 4 * row * block.dims, block.sin + 4 * row * block.dims, block.dims // 2
                    )
            start = simd.take_ticket(pointer, ITEM) * block.item_rows

    return Kernel(rotate, RotateBlock)


@cache
def _make_glu(fmt: Format) -> Kernel:
    def glu(pointer):
        block = carray(pointer, 1)[0]
        row_bytes = block.width * size_of(fmt)
        start = simd.take_ticket(pointer, ITEM) * block.item_rows
        while start < block.rows:
            for row in range(start, min(start + block.item_rows, block.rows)):
                gate = block.gate_up + 2 * row * row_bytes
                _glu_row(fmt, block, gate, gate + row_bytes, block.out + row * row_bytes)
            start = simd.take_ticket(pointer, ITEM) * block.item_rows

    return Kernel(glu, GluBlock)


@cache
def _make_write(fmt: Format) -> Kernel:
    def write(pointer):
        block = carray(pointer, 1)[0]
        size = size_of(fmt)
        start = simd.take_ticket(pointer, ITEM) * block.item_rows
        while start < block.rows:
            for row in range(start, min(start + block.item_rows, block.rows)):
                slot = simd.read_i64(block.slots + 8 * row)
                to = block.kv + slot // block.block_size * block.page + slot % block.block_size * block.token
                for i in range(0, block.width, LANES):
                    left = block.width - i
                    store_as(fmt, to + size * i, load_as(fmt, block.key + row * block.key_row + size * i, left), left)
                    value = load_as(fmt, block.value + row * block.value_row + size * i, left)
                    store_as(fmt, to + block.side + size * i, value, left)
            start = simd.take_ticket(pointer, ITEM) * block.item_rows

    return Kernel(write, WriteBlock)


MAKERS = {"norm": _make_norm, "rotate": _make_rotate, "glu": _make_glu, "write": _make_write}


@simd.inner
def _norm_heads(block, fmt, x):
    """Normalise the queries and keys of one row, at the address `x`, as `RotateBlock` says."""
    size, one = size_of(fmt), float32(1)
    for n in range(0, block.queries, block.query_width):
        part = x + n * size
        _norm_row(fmt, part, 0, block.query_norm, block.wide, part, block.query_width, block.eps, one)
    for n in range(block.queries, block.width, block.key_width):
        part = x + n * size
        _norm_row(fmt, part, 0, block.key_norm, block.wide, part, block.key_width, block.eps, one)


@simd.inner
def _norm_row(fmt, x, delta, weight, wide, out, width, eps, factor):
    size = size_of(fmt)
    squares = simd.splat(float32(0))
    for i in range(0, width, LANES):
        part = load_as(fmt, x + size * i, width - i)
        if delta:
            more = rounded(fmt, simd.mul(load_as(fmt, delta + size * i, width - i), simd.splat(factor)))
            part = rounded(fmt, simd.add(part, more))
            store_as(fmt, x + size * i, part, width - i)
        squares = simd.fma(part, part, squares)
    if weight == 0:
        return
    scale = simd.splat(float32(1) / math.sqrt(simd.total(squares) / float32(width) + eps))
    for i in range(0, width, LANES):
        part = simd.mul(load_as(fmt, x + size * i, width - i), scale)
        if wide:
            part = simd.mul(part, load_as(F32, weight + 4 * i, width - i))
        else:
            part = simd.mul(rounded(fmt, part), load_as(fmt, weight + size * i, width - i))
        store_as(fmt, out + size * i, part, width - i)


@simd.inner
def _rotate_head(fmt, x, cos, sin, half):
    size = size_of(fmt)
    for i in range(0, half, LANES):
        low, high = load_as(fmt, x + size * i, half - i), load_as(fmt, x + size * (half + i), half - i)
        for part, other, place in ((low, high, i), (high, low, half + i)):
            turned = simd.mul(part, load_as(F32, cos + 4 * place, half - i))
            turned = simd.fma(other, load_as(F32, sin + 4 * place, half - i), turned)
            store_as(fmt, x + size * place, turned, half - i)


@simd.inner
def _glu_row(fmt, block, gate, up, out):
    size, one, width = size_of(fmt), simd.splat(float32(1)), block.width
    limit, minus = simd.splat(block.limit), simd.splat(float32(-1))
    for i in range(0, width, LANES):
        part, factor = load_as(fmt, gate + size * i, width - i), load_as(fmt, up + size * i, width - i)
        if block.limit:  # by comparisons, which leave NaN as it is
            part = simd.minimum(limit, part)
            factor = simd.add(simd.maximum(simd.mul(limit, minus), simd.minimum(limit, factor)), one)
        slope = simd.splat(-block.slope)
        if block.gelu:
            slope = simd.fma(simd.mul(part, part), simd.splat(-CUBIC), simd.splat(-LINEAR))
        shrink = simd.exp(simd.mul(part, slope))
        active = rounded(fmt, simd.div(part, simd.add(one, shrink)))
        store_as(fmt, out + size * i, simd.mul(active, factor), width - i)
