"""Linear layers over panels of quantised weights (see quantized_panels.py). Where `code_bits` is not 0, activations are
coded too, in blocks of 32 inputs with one scale, and products are exact sums of integers; otherwise codes become
fp32."""

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

from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import Format, emit_load_number, emit_store
from lora_kernels.cpu.integer_sums import CodedBlock, integer_sums
from lora_kernels.cpu.numba_panel import PanelLoads
from lora_kernels.cpu.numba_unpacked_gemm import MOST_ROWS, multiply_rows
from lora_kernels.cpu.openmp import ITEM, TICKETS, Kernel
from lora_kernels.cpu.quantized_panels import HALF_BITS, LINE, PANEL, PANEL_VECTORS, PanelForm
from lora_kernels.cpu.simd import I32, I64, LANES, VEC, VEC_I32, Emit

# A panel is read from memory once, and from the cache for each further tile of rows. For more than a few rows, blocks
# of weights are unpacked once for all (numba_unpacked_gemm.py), with the same result.


class QuantizedBlock(ctypes.Structure):
    """Argument block of the products: addresses, and strides in bytes. `w` points to the panels, `blocks` counts the
    blocks of a row. For integers, a row of x is its codes, then each block's scale (fp32) and sum (int32)."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("panels", "w", "panel_bytes", "blocks", "bias", "features")),
        *((name, ctypes.c_int64) for name in ("rows", "x", "x_row", "out", "out_row")),
    ]


def code_bits(dtype: torch.dtype, weight_bits: int) -> int:
    """Return the bits, 8 or 16, of the codes of activations in `dtype` that are multiplied by codes of `weight_bits`
    bits; 0 means that products are in fp32."""
    # With AVX2 alone, 8 bits suit only weights of 4 bits, because sums of larger products need more than 16 bits.
    features, is_short = numba.core.codegen.get_host_cpu_features(), dtype != torch.float32
    if is_short and "+avx512vnni" in features:
        return 8
    if "+avx2" not in features or "+avx512f" in features:
        return 0
    return 8 if is_short and weight_bits == HALF_BITS else 16


@cache
def product_kernel(form: PanelForm, fmt: Format) -> Kernel:
    """Return the kernel that multiplies panels of `form`, compiled on first use. Its results are in `fmt`; x is, too,
    unless products are in integers."""

    # The kernel must not have one of the two functions in a variable: numba would not keep the kernel on disk.
    size, in_tiles = fmt.size, form.code_bits == 8 and simd.has_wide_vectors()

    def multiply(pointer):
        block = carray(pointer, 1)[0]
        panel = simd.take_ticket(pointer, ITEM)
        while panel < block.panels:
            following = simd.take_ticket(pointer, ITEM)
            w = block.w + panel * block.panel_bytes
            ahead = block.w + min(following, block.panels - 1) * block.panel_bytes
            bias, count = block.bias + 4 * PANEL * panel, block.features - PANEL * panel
            start = 0
            while start < block.rows:
                x, out = block.x + start * block.x_row, block.out + start * block.out_row + size * PANEL * panel
                left = block.rows - start
                if in_tiles:
                    start += _some_in_tiles(
                        form, fmt, left, x, block.x_row, w, block.blocks, bias, out, block.out_row, count, ahead
                    )
                else:
                    start += _some_unpacked(
                        form, fmt, left, x, block.x_row, w, block.blocks, bias, out, block.out_row, count, ahead
                    )
                ahead = w
            panel = following

    return Kernel(multiply, QuantizedBlock)


@simd.inlined
def _some_unpacked(form, fmt, rows, x, x_row, w, blocks, bias, out, out_row, count, ahead):
    """Multiply the first rows, at most MOST_ROWS of `rows`, by a panel of quantised weights. Return the number of rows
    multiplied; the caller goes on with the next ones. The other arguments are those of `multiply_rows`."""
    if rows == 1:
        _tile_1(form, fmt, x, x_row, w, blocks, bias, out, out_row, count, ahead)
        return 1
    some = min(rows, MOST_ROWS)
    multiply_rows(form, fmt, some, x, x_row, w, blocks, bias, out, out_row, count, ahead)
    return some


@simd.inner
def _some_in_tiles(form, fmt, rows, x, x_row, w, blocks, bias, out, out_row, count, ahead):
    """Multiply the first 8, 4, 2 or 1 of `rows` rows, the most that there are, by a panel whose codes stay in
    registers. Return the number of rows multiplied."""
    simd.stay_apart()
    if rows >= 8:
        _tile_8(form, fmt, x, x_row, w, blocks, bias, out, out_row, count, ahead)
        return 8
    if rows >= 4:
        _tile_4(form, fmt, x, x_row, w, blocks, bias, out, out_row, count, ahead)
        return 4
    if rows >= 2:
        _tile_2(form, fmt, x, x_row, w, blocks, bias, out, out_row, count, ahead)
        return 2
    _tile_1(form, fmt, x, x_row, w, blocks, bias, out, out_row, count, ahead)
    return 1


def _make_tile(rows: int) -> Any:
    """Make an intrinsic that multiplies `rows` rows of x by a panel, add the bias, and store the first `count` columns.
    It prefetches the panel at `ahead`."""

    def codegen(context, builder, signature, args):
        form, fmt = signature.args[0].of, signature.args[1].of
        _, _, x, x_row, w, blocks, bias, out, out_row, count, ahead = args
        tile = _Tile(
            Emit(builder), form, fmt, rows, x, x_row, blocks, PanelLoads(Emit(builder), form, w, blocks, ahead)
        )
        tile.start(bias)
        groups = builder.udiv(blocks, ir.Constant(I64, form.blocks))
        with tile.emit.loop(ir.Constant(I64, 0), groups, 1) as group:
            scales, minima = tile.panel.scales(group)
            first = builder.mul(group, ir.Constant(I64, form.blocks))
            with tile.emit.loop(first, builder.add(first, ir.Constant(I64, form.blocks)), 1) as block:
                (tile.add_integers if form.code_bits else tile.add_floats)(block, scales, minima)
        tile.finish(out, out_row, count)

    @intrinsic
    def tile(typingctx, form, fmt, x, x_row, w, blocks, bias, out, out_row, count, ahead):
        return types.void(form, fmt, *[types.int64] * 9), codegen

    return tile


class _Tile:
    """Emits the products of a tile: `rows` rows of x and one panel."""

    def __init__(
        self, emit: Emit, form: PanelForm, fmt: Format, rows: int, x: Any, x_row: Any, blocks: Any, panel: PanelLoads
    ) -> None:
        self.emit, self.panel = emit, panel
        self._form, self._fmt, self._x, self._x_row = form, fmt, x, x_row
        self._code_bytes = form.code_bits // 8
        self._scales_of_x = emit.offset(x, (blocks, form.block * self._code_bytes))
        self._totals, self._sums = (
            [[cgutils.alloca_once(emit.builder, of) for _ in range(PANEL_VECTORS)] for _ in range(rows)]
            for of in (VEC, VEC_I32)
        )

    def start(self, bias: Any) -> None:
        emit = self.emit
        for row in self._totals:
            for v, place in enumerate(row):
                emit.builder.store(emit.raw(emit.offset(bias, (LINE, v)), VEC, None), place)

    def add_integers(self, block: Any, scales: list[Any], minima: list[Any] | None) -> None:
        """Emit the products of a block in integers, and add them, scaled, to the totals."""
        emit, builder, integers = self.emit, self.emit.builder, integer_sums(self.emit, self._form)
        facts = [emit.offset(self._scales_of_x, (r, self._x_row), (block, 8)) for r in range(len(self._sums))]
        coded = [CodedBlock(emit, place) for place in facts]
        for one, row in zip(coded, self._sums, strict=True):
            for place in row:
                builder.store(integers.start(one), place)
        number = 0
        for quad in self.panel.quads(block):
            for operands in zip(*map(integers.operands, quad), strict=True):
                for r, row in enumerate(self._sums):
                    x = self._codes_of_x(r, block, number)
                    for place, operand in zip(row, operands, strict=True):
                        builder.store(integers.add(builder.load(place), operand, x), place)
                number += 1
        for one, row, totals in zip(coded, self._sums, self._totals, strict=True):
            for v, (place, total) in enumerate(zip(row, totals, strict=True)):
                minimum, sums = minima and minima[v], integers.end(one, builder.load(place))
                builder.store(one.add(builder.load(total), sums, scales[v], minimum), total)

    def _codes_of_x(self, row: int, block: Any, number: int) -> Any:
        """Emit a load of four bytes of the codes of a row's activations in a block, the `number`th ones. Return them in
        each lane."""
        emit = self.emit
        place = emit.offset(self._x, (row, self._x_row), (block, self._form.block * self._code_bytes), (1, 4 * number))
        return emit.splat_int(emit.builder.load(emit.at(place, I32), align=1))

    def add_floats(self, block: Any, scales: list[Any], minima: list[Any] | None) -> None:
        """Emit the products of a block with fp32 weights, and add them to the totals."""
        emit, builder, size = self.emit, self.emit.builder, self._fmt.size
        for k, weights in enumerate(self.panel.weights(block, scales, minima)):
            for r, row in enumerate(self._totals):
                place_of_x = emit.offset(self._x, (r, self._x_row), (block, self._form.block * size), (1, k * size))
                factor = emit.splat(emit_load_number(emit, self._fmt, place_of_x))
                for place, weight in zip(row, weights, strict=True):
                    builder.store(emit.fma(factor, weight, builder.load(place)), place)

    def finish(self, out: Any, out_row: Any, count: Any) -> None:
        emit, size = self.emit, self._fmt.size
        for r, row in enumerate(self._totals):
            for v, place in enumerate(row):
                left = emit.builder.sub(count, ir.Constant(I64, LANES * v))
                address = emit.offset(out, (r, out_row), (size * LANES, v))
                emit_store(emit, self._fmt, address, emit.builder.load(place), left)


_tile_1, _tile_2, _tile_4, _tile_8 = (_make_tile(rows) for rows in (1, 2, 4, 8))
