"""Linear layers over panels of quantised weights (see quantized_panels.py), in integers or in fp32.

*In integers*, each row's activations are coded in 8 bits as well, with a scale for each block of 32 inputs, and
products are sums of bytes times bytes (AVX512-VNNI: 64 of them an instruction, twice as many as in bf16). Such a sum is
exact; it is multiplied by both scales in fp32. *In fp32*, codes become fp32 weights in registers, and nothing is
rounded but the result; this needs no special instructions.

As in numba_gemm.py, a panel is read from memory once, and from the second-level cache for each further tile of rows,
and a row's result does not depend on the other rows.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numba
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import Format, emit_load_number, emit_store
from lora_kernels.cpu.openmp import ITEM, TICKETS, Kernel
from lora_kernels.cpu.quantized_panels import HALF_BITS, LINE, PANEL, PANEL_VECTORS, QUAD, PanelForm
from lora_kernels.cpu.simd import F32, I32, I64, LANES, VEC, VEC_BYTES, VEC_HALF, VEC_I16, VEC_I32, Emit, every


class QuantizedBlock(ctypes.Structure):
    """Argument block of the products: addresses, and strides in bytes. `w` points to the panels, `blocks` is the number
    of blocks of a row, and `bias` points to one fp32 for each output of every panel. In integers, a row of x has its
    codes, and then the scale (fp32) and the sum of codes (int32) of each block."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("panels", "w", "panel_bytes", "blocks", "bias", "features")),
        *((name, ctypes.c_int64) for name in ("rows", "x", "x_row", "out", "out_row")),
    ]


def has_integer_products() -> bool:
    """Returns whether this processor has AVX512-VNNI."""
    return "+avx512vnni" in numba.core.codegen.get_host_cpu_features()


@cache
def product_kernel(form: PanelForm, fmt: Format) -> Kernel:
    """Returns the kernel that multiplies panels of `form`, compiled on first use. Its results are in `fmt`; x is, too,
    unless products are in integers."""

    size, most, pairs = fmt.size, form.most_rows, 2 in form.tiles

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
                rows = _tile_rows(block.rows - start, most, pairs)
                x, out = block.x + start * block.x_row, block.out + start * block.out_row + size * PANEL * panel
                _tile(form, fmt, rows, x, block.x_row, w, block.blocks, bias, out, block.out_row, count, ahead)
                ahead = w
                start += rows
            panel = following

    return Kernel(multiply, QuantizedBlock)


@njit
def _tile_rows(rows, most, pairs):
    """Returns how many of `rows` rows the next tile has: at most `most`, and one of `PanelForm.tiles`."""
    if rows >= most:
        return most
    if rows >= 4:
        return 4
    return 2 if pairs and rows >= 2 else 1


@njit
def _tile(form, fmt, rows, x, x_row, w, blocks, bias, out, out_row, count, ahead):
    simd.stay_apart()
    if rows == 8:
        _tile_8(form, fmt, x, x_row, w, blocks, bias, out, out_row, count, ahead)
    elif rows == 4:
        _tile_4(form, fmt, x, x_row, w, blocks, bias, out, out_row, count, ahead)
    elif rows == 2:
        _tile_2(form, fmt, x, x_row, w, blocks, bias, out, out_row, count, ahead)
    else:
        _tile_1(form, fmt, x, x_row, w, blocks, bias, out, out_row, count, ahead)


def _make_tile(rows: int) -> Any:
    """Makes an intrinsic that multiplies `rows` rows of x by a panel, adds the bias, and stores the first `count`
    columns. It prefetches the panel at `ahead`."""

    def codegen(context, builder, signature, args):
        form, fmt = signature.args[0].of, signature.args[1].of
        if rows not in form.tiles:
            return  # never called
        _, _, x, x_row, w, blocks, bias, out, out_row, count, ahead = args
        tile = _Tile(Emit(builder), form, fmt, rows, x, x_row, blocks, _Panel(Emit(builder), form, w, blocks, ahead))
        tile.start(bias)
        groups = builder.udiv(blocks, ir.Constant(I64, form.blocks))
        with tile.emit.loop(ir.Constant(I64, 0), groups, 1) as group:
            scales, minima = tile.panel.scales(group)
            first = builder.mul(group, ir.Constant(I64, form.blocks))
            with tile.emit.loop(first, builder.add(first, ir.Constant(I64, form.blocks)), 1) as block:
                (tile.add_integers if form.integers else tile.add_floats)(block, scales, minima)
        tile.finish(out, out_row, count)

    @intrinsic
    def tile(typingctx, form, fmt, x, x_row, w, blocks, bias, out, out_row, count, ahead):
        return types.void(form, fmt, *[types.int64] * 9), codegen

    return tile


class _Panel:
    """Emits the loads of a panel at the address `w`, and prefetches of the panel at `ahead`."""

    def __init__(self, emit: Emit, form: PanelForm, w: Any, blocks: Any, ahead: Any) -> None:
        self._emit, self._form = emit, form
        self._lower, self._ahead = w, ahead
        self._upper = emit.offset(w, (blocks, form.block_bytes))
        self._upper_ahead = emit.offset(ahead, (blocks, form.block_bytes))
        self._scales = emit.offset(self._upper, (blocks, form.upper_bytes))
        groups = emit.builder.udiv(blocks, ir.Constant(I64, form.blocks))
        self._minima = emit.offset(self._scales, (groups, form.scale_bytes * PANEL))
        self._units = emit.offset(self._minima, (groups, form.scale_bytes * PANEL if form.has_minima else 0))
        shared = emit.builder.udiv(groups, ir.Constant(I64, form.coding.shared)) if form.coding.shared else groups
        self._minima_units = emit.offset(self._units, (shared, 2 * PANEL))

    def scales(self, group: Any) -> tuple[list[Any], list[Any] | None]:
        """Emits loads of a group's scales, and of what a code of 0 stands for or None if that is 0, as fp32 vectors."""
        coding, builder = self._form.coding, self._emit.builder
        scales = self._numbers(self._scales, self._units, group)
        if coding.zero is None:
            minima = self._numbers(self._minima, self._minima_units, group)
            if coding.in_scales:
                minima = [builder.fmul(low, scale) for low, scale in zip(minima, scales, strict=True)]
            return scales, minima
        if self._form.integers or not coding.zero:
            return scales, None
        return scales, [builder.fmul(scale, every(-float(coding.zero), VEC)) for scale in scales]

    def _numbers(self, plane: Any, units: Any, group: Any) -> list[Any]:
        """Emits loads of a group's numbers, multiplied by their units if there are any."""
        emit, shared, found = self._emit, self._form.coding.shared, []
        if not shared:
            return self._halves(plane, group)
        for v, unit in enumerate(self._halves(units, emit.builder.udiv(group, ir.Constant(I64, shared)))):
            place = emit.offset(plane, (group, PANEL), (LANES, v))
            multiple = emit.builder.sext(emit.builder.load(emit.at(place, VEC_BYTES), align=1), VEC_I32)
            found.append(emit.builder.fmul(emit.builder.sitofp(multiple, VEC), unit))
        return found

    def _halves(self, plane: Any, group: Any) -> list[Any]:
        emit, found = self._emit, []
        for v in range(PANEL_VECTORS):
            bits = emit.raw(emit.offset(plane, (group, 2 * PANEL), (2 * LANES, v)), VEC_I16, None)
            found.append(emit.builder.fpext(emit.builder.bitcast(bits, VEC_HALF), VEC))
        return found

    def quads(self, block: Any) -> Any:
        """Emits loads of a block's codes, and yields the vectors of each quad, one byte a code."""
        form, builder = self._form, self._emit.builder
        upper: list[Any] = []
        for number in range(form.block // QUAD):
            part = number % form.quads_in_vector
            if not part:
                line = number // form.quads_in_vector * PANEL_VECTORS * LINE
                lower = self._lines(self._lower, self._ahead, block, form.block_bytes, line)
            if form.quads_in_vector == 1:
                yield lower
                continue
            codes = [self._field(one, HALF_BITS * part, HALF_BITS) for one in lower]
            if form.upper_bits:
                step = 8 // form.upper_bits
                if not number % step:
                    line = number // step * PANEL_VECTORS * LINE
                    upper = self._lines(self._upper, self._upper_ahead, block, form.upper_bytes, line)
                tops = [self._field(one, form.upper_bits * (number % step), form.upper_bits) for one in upper]
                shift = every(HALF_BITS, VEC_I32)
                codes = [builder.or_(low, builder.shl(top, shift)) for low, top in zip(codes, tops, strict=True)]
            yield codes

    def _lines(self, plane: Any, ahead: Any, block: Any, block_bytes: int, line: int) -> list[Any]:
        emit, found = self._emit, []
        for v in range(PANEL_VECTORS):
            place = (block, block_bytes), (1, line + LINE * v)
            found.append(emit.builder.load(emit.at(emit.offset(plane, *place), VEC_I32), align=LINE))
            emit.prefetch(emit.offset(ahead, *place))
        return found

    def _field(self, vector: Any, shift: int, bits: int) -> Any:
        """Emits the extraction of `bits` bits of each byte, from bit `shift` on."""
        builder = self._emit.builder
        moved = builder.lshr(vector, every(shift, VEC_I32)) if shift else vector
        return builder.and_(moved, every((2**bits - 1) * 0x01010101, VEC_I32))


class _Tile:
    """Emits the products of a tile: `rows` rows of x and one panel."""

    def __init__(
        self, emit: Emit, form: PanelForm, fmt: Format, rows: int, x: Any, x_row: Any, blocks: Any, panel: _Panel
    ) -> None:
        self.emit, self.panel = emit, panel
        self._form, self._fmt, self._x, self._x_row = form, fmt, x, x_row
        self._scales_of_x = emit.offset(x, (blocks, form.block))
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
        """Emits the products of a block in integers, and adds them, scaled, to the totals."""
        emit, builder, zero = self.emit, self.emit.builder, self._form.coding.zero or 0
        facts = []
        for r, row in enumerate(self._sums):
            place = emit.offset(self._scales_of_x, (r, self._x_row), (block, 8))
            total = builder.load(emit.at(emit.offset(place, (4, 1)), I32), align=4)
            facts.append((builder.load(emit.at(place, F32), align=4), total))
            start = emit.splat_int(builder.mul(total, ir.Constant(I32, -zero)))
            for sums in row:
                builder.store(start, sums)
        for number, codes in enumerate(self.panel.quads(block)):
            for r, row in enumerate(self._sums):
                place = emit.offset(self._x, (r, self._x_row), (block, self._form.block), (1, QUAD * number))
                quad = emit.splat_int(builder.load(emit.at(place, I32), align=1))
                for sums, code in zip(row, codes, strict=True):
                    name = "llvm.x86.avx512.vpdpbusd.512"
                    builder.store(emit.call(name, VEC_I32, builder.load(sums), code, quad), sums)
        for (scale, total), row, totals in zip(facts, self._sums, self._totals, strict=True):
            factor = emit.splat(scale)
            offset = emit.splat(builder.fmul(scale, builder.sitofp(total, F32)))
            for v, (sums, place) in enumerate(zip(row, totals, strict=True)):
                added = builder.fmul(builder.sitofp(builder.load(sums), VEC), factor)
                result = emit.fma(added, scales[v], builder.load(place))
                if minima is not None:
                    result = emit.fma(offset, minima[v], result)
                builder.store(result, place)

    def add_floats(self, block: Any, scales: list[Any], minima: list[Any] | None) -> None:
        """Emits the products of a block with fp32 weights, and adds them to the totals."""
        emit, builder, fmt = self.emit, self.emit.builder, self._fmt
        for number, codes in enumerate(self.panel.quads(block)):
            for k in range(QUAD):
                weights = []
                for v, code in enumerate(codes):
                    byte = builder.and_(builder.lshr(code, every(8 * k, VEC_I32)), every(255, VEC_I32))
                    value = builder.uitofp(byte, VEC)
                    low = every(0.0, VEC) if minima is None else minima[v]
                    weights.append(emit.fma(value, scales[v], low))
                for r, row in enumerate(self._totals):
                    columns = (block, self._form.block * fmt.size), (1, (QUAD * number + k) * fmt.size)
                    factor = emit.splat(emit_load_number(emit, fmt, emit.offset(self._x, (r, self._x_row), *columns)))
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
