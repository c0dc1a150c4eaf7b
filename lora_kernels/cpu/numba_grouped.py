"""The linear layers of all experts of a layer in one call: each expert's weight, in panels (numba_tiles.py), times the
entries of that expert. Experts without entries are not read, and results do not depend on other entries."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from itertools import chain

import torch
import torch.nn.functional as F
from numba import carray
from torch import Tensor

from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import FORMATS, Format
from lora_kernels.cpu.huge_pages import zeros
from lora_kernels.cpu.numba_tiles import multiply_panel, pack_panels, panel_dtype
from lora_kernels.cpu.openmp import ITEM, TICKETS, Kernel, team
from lora_kernels.cpu.simd import LANES


class GroupedArguments(ctypes.Structure):
    """Argument block of the kernel: addresses, and strides in bytes. An item is one panel of an expert that has entries
    (`starts`, see `Routing`). `w` points to all panels, of `panel_bytes` each; `bias` to fp32 numbers, or is 0."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("experts", "starts", "panels", "w", "panel_bytes", "width", "bias")),
        *((name, ctypes.c_int64) for name in ("x", "x_row", "out", "out_row", "features")),
    ]


class PackedExperts:
    """A `GroupedLinear` of `count` experts with packed copies of `weights`, each [out_features, in_features]. Results
    are in `out_dtype`, by default the weights' dtype. `biases` [count, out_features] are added before rounding."""

    def __init__(
        self,
        weights: Iterator[Tensor],
        count: int,
        out_dtype: torch.dtype | None = None,
        biases: Tensor | None = None,
    ) -> None:
        first = next(weights)
        self._features, self._width = first.shape
        self._dtype, self._out_dtype = first.dtype, out_dtype or first.dtype
        self._panels, self._count = -(-self._features // LANES), count
        self._weights = self._pack(chain([first], weights), panel_dtype(first))
        self._biases = biases if biases is None else F.pad(biases.float(), (0, self._panels * LANES - self._features))
        formats = (FORMATS[dtype] for dtype in (self._dtype, self._weights.dtype, self._out_dtype))
        self._kernel, self._team = grouped_kernel(*formats), team()
        self._block = GroupedArguments(
            experts=count,
            panels=self._panels,
            w=self._weights.data_ptr(),
            panel_bytes=self._width * LANES * self._weights.element_size(),
            width=self._width,
            bias=0 if self._biases is None else self._biases.data_ptr(),
            x_row=self._width * self._dtype.itemsize,
            out_row=self._features * self._out_dtype.itemsize,
            features=self._features,
        )

    def _pack(self, weights: Iterator[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the panels of all experts, [experts, panels, in_features, 16], in `dtype` if it holds all exactly."""
        packed = zeros(self._count, self._panels, self._width, LANES, dtype=dtype)
        for number, weight in zip(range(self._count), weights, strict=True):
            if packed.dtype != weight.dtype and panel_dtype(weight) != packed.dtype:
                packed = zeros(*packed.shape, dtype=weight.dtype).copy_(packed)
            pack_panels(weight, packed[number])
        return packed

    @property
    def nbytes(self) -> int:
        return self._weights.nbytes

    def __call__(self, x: Tensor, starts: Tensor) -> Tensor:
        """Return the output, a new tensor [num_entries, out_features]: see `GroupedLinear`. Raises ValueError unless
        `x` is [num_entries, in_features] in the dtype of the weights."""
        if x.dtype != self._dtype or x.shape[1] != self._width:
            expected = f"{self._dtype} [num_entries, {self._width}]"
            raise ValueError(f"linears of experts of {expected} were given {x.dtype} {list(x.shape)}")
        x = x.contiguous()
        out = self._team.empty((len(x), self._features), self._out_dtype)
        block = self._block
        block.starts, block.x, block.out = starts.data_ptr(), x.data_ptr(), out.data_ptr()
        self._team.run(self._kernel, block, min(len(x), self._count) * self._panels)
        return out


@cache
def grouped_kernel(fmt: Format, w_fmt: Format, out_fmt: Format) -> Kernel:
    """Return the kernel for inputs in `fmt`, panels in `w_fmt` and results in `out_fmt`, compiled on first use."""
    out_size = out_fmt.size

    def multiply(pointer):
        block = carray(pointer, 1)[0]
        item = simd.take_ticket(pointer, ITEM)
        expert, end = _find(block, item, -1, 0)
        while expert < block.experts:
            panel = item - (end - block.panels)
            item = simd.take_ticket(pointer, ITEM)
            following, next_end = _find(block, item, expert, end)
            w = _weights(block, expert, panel)
            ahead = w
            if following < block.experts:
                ahead = _weights(block, following, item - (next_end - block.panels))
            first = simd.read_i32(block.starts + 4 * expert)
            multiply_panel(
                fmt,
                w_fmt,
                out_fmt,
                simd.read_i32(block.starts + 4 * expert + 4) - first,
                block.x + first * block.x_row,
                block.x_row,
                w,
                block.width,
                block.bias + 4 * LANES * (expert * block.panels + panel) if block.bias else 0,
                block.out + first * block.out_row + out_size * LANES * panel,
                block.out_row,
                block.features - LANES * panel,
                ahead,
            )
            expert, end = following, next_end

    return Kernel(multiply, GroupedArguments)


@simd.inner
def _find(block, item, expert, end):
    """Return the expert of work item number `item`, `block.experts` beyond the last, and the number of the first item
    after that expert's. `expert` and `end` are the result for an earlier item, or -1 and 0."""
    while item >= end and expert < block.experts:
        expert += 1
        if expert < block.experts and _has_entries(block, expert):
            end += block.panels
    return expert, end


@simd.inner
def _has_entries(block, expert):
    return simd.read_i32(block.starts + 4 * expert) < simd.read_i32(block.starts + 4 * expert + 4)


@simd.inner
def _weights(block, expert, panel):
    """Return the address of panel number `panel` of an expert's weight."""
    return block.w + (expert * block.panels + panel) * block.panel_bytes
