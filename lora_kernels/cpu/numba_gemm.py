"""bf16 linear layers for processors with AVX512-BF16 and the few dozen rows of decoding. Weights are packed in panels
of 48 outputs, each one run of memory, read from memory once for all tiles of up to eight rows."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numba
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import FORMATS, Format, emit_store
from lora_kernels.cpu.openmp import ITEM, TICKETS, Kernel, team
from lora_kernels.cpu.simd import I32, I64, LANES, VEC, Emit

PANEL_VECTORS, TILE_ROWS = 3, 8
"""Vectors of a panel, and rows of a tile: 24 sums, three weights and an input take 28 of AVX-512's 32 registers."""
PANEL = PANEL_VECTORS * LANES
PAIR_BYTES = 64 * PANEL_VECTORS
"""Bytes of a panel's weights for two inputs."""
CACHE_LINE = 64


class _BFloat(ir.types._BaseFloatType):
    """LLVM's bfloat type, which llvmlite lacks and the instruction's intrinsic requires."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


class GemmArguments(ctypes.Structure):
    """Argument block of the linear layer's kernel: addresses, and strides in bytes. `w` points to the panels, `pairs`
    is half the number of inputs, and `bias` points to one fp32 for each output of every panel."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("panels", "w", "pairs", "bias", "features")),
        *((name, ctypes.c_int64) for name in ("rows", "x", "x_row", "out", "out_row")),
    ]


class PackedLinear:
    """A linear layer with a packed copy of its weight: bf16 [num_rows, in_features] -> [num_rows, out_features] in
    `out_dtype`, bf16 or fp32. Requires a weight for which `can_pack` is True."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype = torch.bfloat16) -> None:
        self._features, self._width = weight.shape
        self._out_dtype = out_dtype
        self._weight = _pack(weight)
        self._bias = torch.zeros(len(self._weight) * PANEL)
        if bias is not None:
            self._bias[: self._features] = bias
        self._kernel, self._team = _kernel(FORMATS[out_dtype]), team()
        self._block = GemmArguments(
            panels=len(self._weight),
            w=self._weight.data_ptr(),
            pairs=self._width // 2,
            bias=self._bias.data_ptr(),
            features=self._features,
            out_row=out_dtype.itemsize * self._features,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output, a new tensor. Raises ValueError unless `x` is bf16 [num_rows, in_features]."""
        if x.dtype != torch.bfloat16 or x.shape[1] != self._width:
            raise ValueError(f"a linear of bf16 [num_rows, {self._width}] was given {x.dtype} {list(x.shape)}")
        x, rows = x.contiguous(), x.shape[0]
        out = self._team.empty((rows, self._features), self._out_dtype)
        block = self._block
        block.rows, block.x, block.x_row, block.out = rows, x.data_ptr(), 2 * self._width, out.data_ptr()
        self._team.run(self._kernel, block, block.panels if rows else 0)
        return out


def can_pack(weight: Tensor) -> bool:
    """Return whether this processor has AVX512-BF16 and the weight is bf16 with an even number of inputs."""
    features = numba.core.codegen.get_host_cpu_features()
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and "+avx512bf16" in features


def _pack(weight: Tensor) -> Tensor:
    """Pack a weight into panels. Return bf16 [panels, in_features / 2, 48, 2], aligned to cache lines, with zeros for
    outputs that pad the last panel."""
    features, width = weight.shape
    padded = weight.new_zeros(-(-features // PANEL) * PANEL, width)
    padded[:features] = weight
    panels = padded.view(-1, PANEL, width // 2, 2).transpose(1, 2)
    raw = torch.empty(panels.numel() + CACHE_LINE, dtype=torch.bfloat16)
    start = -raw.data_ptr() % CACHE_LINE // 2
    return raw[start : start + panels.numel()].view(panels.shape).copy_(panels)


@cache
def _kernel(fmt: Format) -> Kernel:
    """Return the kernel whose results are in `fmt`, compiled on first use."""
    size = fmt.size

    def multiply(pointer):
        block = carray(pointer, 1)[0]
        panel_bytes = PAIR_BYTES * block.pairs
        tiles = (block.rows + TILE_ROWS - 1) // TILE_ROWS
        panel = simd.take_ticket(pointer, ITEM)
        while panel < block.panels:
            following = simd.take_ticket(pointer, ITEM)
            w = block.w + panel * panel_bytes
            ahead = block.w + min(following, block.panels - 1) * panel_bytes
            start = 0
            for tile in range(tiles):
                stop = block.rows * (tile + 1) // tiles
                _tile(
                    fmt,
                    stop - start,
                    block.x + start * block.x_row,
                    block.x_row,
                    w,
                    block.pairs,
                    block.bias + 4 * PANEL * panel,
                    block.out + start * block.out_row + size * PANEL * panel,
                    block.out_row,
                    block.features - PANEL * panel,
                    w if tile else ahead,
                )
                start = stop
            panel = following

    return Kernel(multiply, GemmArguments)


def _make_tile(rows: int) -> Any:
    """Make an intrinsic that multiplies `rows` rows of x by a panel, add the bias, and store the first `count` columns
    in `fmt`. It prefetches the panel at `ahead`."""

    def codegen(context, builder, signature, args):
        fmt = signature.args[0].of
        _, x, x_row, w, pairs, bias, out, out_row, count, ahead = args
        emit = Emit(builder)
        sums = [[cgutils.alloca_once(builder, VEC) for _ in range(PANEL_VECTORS)] for _ in range(rows)]
        for row in sums:
            for v, place in enumerate(row):
                builder.store(emit.raw(emit.offset(bias, (64, v)), VEC, None), place)
        with emit.loop(ir.Constant(I64, 0), pairs, 1) as k:
            weights = []
            for v in range(PANEL_VECTORS):
                line = emit.offset(w, (k, PAIR_BYTES), (64, v))
                weights.append(builder.load(emit.at(line, _PAIRS), align=CACHE_LINE))
                emit.prefetch(emit.offset(ahead, (k, PAIR_BYTES), (64, v)))
            for r, row in enumerate(sums):
                pair = builder.load(emit.at(emit.offset(x, (r, x_row), (k, 4)), I32), align=2)
                pairs_of_x = builder.bitcast(emit.splat_int(pair), _PAIRS)
                for place, weight in zip(row, weights, strict=True):
                    name = "llvm.x86.avx512bf16.dpbf16ps.512"
                    builder.store(emit.call(name, VEC, builder.load(place), pairs_of_x, weight), place)
        for r, row in enumerate(sums):
            for v, place in enumerate(row):
                left = builder.sub(count, ir.Constant(I64, LANES * v))
                address = emit.offset(out, (r, out_row), (fmt.size * LANES, v))
                emit_store(emit, fmt, address, builder.load(place), left)

    @intrinsic
    def tile(typingctx, fmt, x, x_row, w, pairs, bias, out, out_row, count, ahead):
        return types.void(fmt, *[types.int64] * 9), codegen

    return tile


_tile_1, _tile_2, _tile_3, _tile_4 = (_make_tile(rows) for rows in (1, 2, 3, 4))
_tile_5, _tile_6, _tile_7, _tile_8 = (_make_tile(rows) for rows in (5, 6, 7, 8))


@simd.inner
def _tile(fmt, rows, x, x_row, w, pairs, bias, out, out_row, count, ahead):
    simd.stay_apart()
    if rows == 8:
        _tile_8(fmt, x, x_row, w, pairs, bias, out, out_row, count, ahead)
    elif rows == 7:
        _tile_7(fmt, x, x_row, w, pairs, bias, out, out_row, count, ahead)
    elif rows == 6:
        _tile_6(fmt, x, x_row, w, pairs, bias, out, out_row, count, ahead)
    elif rows == 5:
        _tile_5(fmt, x, x_row, w, pairs, bias, out, out_row, count, ahead)
    elif rows == 4:
        _tile_4(fmt, x, x_row, w, pairs, bias, out, out_row, count, ahead)
    elif rows == 3:
        _tile_3(fmt, x, x_row, w, pairs, bias, out, out_row, count, ahead)
    elif rows == 2:
        _tile_2(fmt, x, x_row, w, pairs, bias, out, out_row, count, ahead)
    else:
        _tile_1(fmt, x, x_row, w, pairs, bias, out, out_row, count, ahead)
