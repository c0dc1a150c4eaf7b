"""The linear layers of all experts of a layer in one call: each expert's weight times the entries of that expert.

A *panel* is sixteen outputs of an expert, whose weights are one run of memory. It is read from memory once and from the
cache for every further tile of up to six entries, whose sums stay in registers (with AVX2, twelve of sixteen). While a
panel's first tile is computed, the thread's next panel is prefetched. Experts without entries are not read. An entry's
result does not depend on the other entries.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import FORMATS, Format, emit_load, emit_load_number, emit_store
from lora_kernels.cpu.openmp import ITEM, TICKETS, Kernel, team
from lora_kernels.cpu.simd import I64, LANES, VEC, Emit, every

TILE_ROWS = 6


class GroupedArguments(ctypes.Structure):
    """Argument block of the kernel: addresses, and strides in bytes. `experts` is int64 [active experts], those that
    have entries, of which each has `panels` items. `w` points to the panels of all experts, of `panel_bytes` each."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("num_items", "experts", "starts", "panels", "w", "panel_bytes", "width")),
        *((name, ctypes.c_int64) for name in ("x", "x_row", "out", "out_row", "features")),
    ]


class PackedExperts:
    """The linears of `count` experts with packed copies of their weights, each [out_features, in_features] in fp32,
    bf16 or fp16, of which `weights` yields one for each expert. Results are in `out_dtype`; None means that of the
    weights."""

    def __init__(self, weights: Iterator[Tensor], count: int, out_dtype: torch.dtype | None = None) -> None:
        first = next(weights)
        self._features, self._width = first.shape
        self._dtype, self._out_dtype = first.dtype, out_dtype or first.dtype
        self._panels = -(-self._features // LANES)
        self._weights = first.new_zeros(count, self._panels, self._width, LANES)
        for packed, weight in zip(self._weights, chain([first], weights), strict=True):
            _pack(weight, packed)
        self._kernel, self._team = _kernel(FORMATS[self._dtype], FORMATS[self._out_dtype]), team()
        size = first.element_size()
        self._block = GroupedArguments(
            panels=self._panels,
            w=self._weights.data_ptr(),
            panel_bytes=self._width * LANES * size,
            width=self._width,
            x_row=self._width * size,
            out_row=self._features * self._out_dtype.itemsize,
            features=self._features,
        )

    def __call__(self, x: Tensor, starts: Tensor) -> Tensor:
        """Returns the output, a new tensor [num_entries, out_features]: see `GroupedLinear`. Raises ValueError unless
        `x` is [num_entries, in_features] in the dtype of the weights."""
        if x.dtype != self._dtype or x.shape[1] != self._width:
            expected = f"{self._dtype} [num_entries, {self._width}]"
            raise ValueError(f"linears of experts of {expected} were given {x.dtype} {list(x.shape)}")
        x = x.contiguous()
        out = self._team.empty((len(x), self._features), self._out_dtype)
        active = np.flatnonzero(np.diff(starts.numpy()))
        block = self._block
        block.num_items, block.experts, block.starts = len(active) * self._panels, active.ctypes.data, starts.data_ptr()
        block.x, block.out = x.data_ptr(), out.data_ptr()
        self._team.run(self._kernel, block, block.num_items)
        return out


def _pack(weight: Tensor, packed: Tensor) -> None:
    """Copies a weight [out_features, in_features] into `packed` [panels, in_features, 16], whose outputs beyond the
    weight's stay 0."""
    features, width = weight.shape
    whole = features // LANES
    packed[:whole] = weight[: whole * LANES].view(whole, LANES, width).transpose(1, 2)
    if rest := features % LANES:
        packed[whole, :, :rest] = weight[whole * LANES :].T


@cache
def _kernel(fmt: Format, out_fmt: Format) -> Kernel:
    """Returns the kernel for inputs and weights in `fmt` and results in `out_fmt`, compiled on first use."""
    out_size = out_fmt.size

    def multiply(pointer):
        block = carray(pointer, 1)[0]
        item = simd.take_ticket(pointer, ITEM)
        while item < block.num_items:
            following = simd.take_ticket(pointer, ITEM)
            expert, panel = simd.read_i64(block.experts + 8 * (item // block.panels)), item % block.panels
            w = _weights(block, item)
            ahead = _weights(block, following) if following < block.num_items else w
            first = simd.read_i32(block.starts + 4 * expert)
            count = simd.read_i32(block.starts + 4 * expert + 4) - first
            tiles, start = (count + TILE_ROWS - 1) // TILE_ROWS, 0
            for tile in range(tiles):
                stop = count * (tile + 1) // tiles
                _tile(
                    fmt,
                    out_fmt,
                    stop - start,
                    block.x + (first + start) * block.x_row,
                    block.x_row,
                    w,
                    block.width,
                    block.out + (first + start) * block.out_row + out_size * LANES * panel,
                    block.out_row,
                    block.features - LANES * panel,
                    w if tile else ahead,
                )
                start = stop
            item = following

    return Kernel(multiply, GroupedArguments)


@njit
def _weights(block, item):
    """Returns the address of an item's panel."""
    expert = simd.read_i64(block.experts + 8 * (item // block.panels))
    return block.w + (expert * block.panels + item % block.panels) * block.panel_bytes


def _make_tile(rows: int) -> Any:
    """Makes an intrinsic that multiplies `rows` rows of x by a panel and stores the first `count` columns. It
    prefetches the panel at `ahead`."""

    def codegen(context, builder, signature, args):
        fmt, out_fmt = signature.args[0].of, signature.args[1].of
        _, _, x, x_row, w, width, out, out_row, count, ahead = args
        emit = Emit(builder)
        sums = [cgutils.alloca_once(builder, VEC) for _ in range(rows)]
        for place in sums:
            builder.store(every(0.0, VEC), place)
        with emit.loop(ir.Constant(I64, 0), width, 1) as k:
            weight = emit_load(emit, fmt, emit.offset(w, (k, fmt.size * LANES)))
            emit.prefetch(emit.offset(ahead, (k, fmt.size * LANES)))
            for r, place in enumerate(sums):
                value = emit.splat(emit_load_number(emit, fmt, emit.offset(x, (r, x_row), (k, fmt.size))))
                builder.store(emit.fma(value, weight, builder.load(place)), place)
        for r, place in enumerate(sums):
            emit_store(emit, out_fmt, emit.offset(out, (r, out_row)), builder.load(place), count)

    @intrinsic
    def tile(typingctx, fmt, out_fmt, x, x_row, w, width, out, out_row, count, ahead):
        return types.void(fmt, out_fmt, *[types.int64] * 8), codegen

    return tile


_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = (_make_tile(rows) for rows in range(1, TILE_ROWS + 1))


@njit
def _tile(fmt, out_fmt, rows, x, x_row, w, width, out, out_row, count, ahead):
    simd.stay_apart()
    if rows == 6:
        _tile_6(fmt, out_fmt, x, x_row, w, width, out, out_row, count, ahead)
    elif rows == 5:
        _tile_5(fmt, out_fmt, x, x_row, w, width, out, out_row, count, ahead)
    elif rows == 4:
        _tile_4(fmt, out_fmt, x, x_row, w, width, out, out_row, count, ahead)
    elif rows == 3:
        _tile_3(fmt, out_fmt, x, x_row, w, width, out, out_row, count, ahead)
    elif rows == 2:
        _tile_2(fmt, out_fmt, x, x_row, w, width, out, out_row, count, ahead)
    else:
        _tile_1(fmt, out_fmt, x, x_row, w, width, out, out_row, count, ahead)
