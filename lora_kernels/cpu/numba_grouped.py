"""The linear layers of all experts of a layer in one call: each expert's weight times the entries of that expert.

A panel of an expert's weight (see numba_tiles.py) is read from memory once and from the cache for every further tile of
entries. While a panel's first tile is computed, the thread's next panel is prefetched. Experts without entries are not
read. An entry's result does not depend on the other entries.
"""

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
    """Argument block of the kernel: addresses, and strides in bytes. A work item is one panel of an expert that has
    entries; the kernel finds an item's expert in `starts` (`Routing.starts`). `w` points to the panels of all experts,
    of `panel_bytes` each, and `bias` to one fp32 for each output of every panel, or is 0."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("experts", "starts", "panels", "w", "panel_bytes", "width", "bias")),
        *((name, ctypes.c_int64) for name in ("x", "x_row", "out", "out_row", "features")),
    ]


class PackedExperts:
    """A `GroupedLinear` of `count` experts with packed copies of their weights. `weights` yields the weight of each
    expert, [out_features, in_features] in fp32, bf16 or fp16. Results are in `out_dtype`; None means the dtype of the
    weights. `biases` [count, out_features], unless None, are added before results are rounded."""

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
        """Returns the panels of all experts, [experts, panels, in_features, 16], in `dtype` if it holds all exactly."""
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
        """Returns the output, a new tensor [num_entries, out_features]: see `GroupedLinear`. Raises ValueError unless
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
    """Returns the kernel for inputs in `fmt`, panels in `w_fmt` and results in `out_fmt`, compiled on first use."""
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
    """Returns the expert of work item number `item`, and the number of the first item after that expert's. The search
    starts from `expert` and `end`, the result for an earlier item, or -1 and 0 for the first search. Beyond the last
    item, the expert is `block.experts`."""
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
    """Returns the address of panel number `panel` of an expert's weight."""
    return block.w + (expert * block.panels + panel) * block.panel_bytes
