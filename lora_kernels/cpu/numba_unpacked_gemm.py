"""Products of several rows and a panel of quantised weights in fp32, whose weights are unpacked once for all rows.

The weights of a block of inputs, [block, 48] fp32, are unpacked into the first-level cache and multiplied by up to 64
rows, a tile of rows at a time, whose sums stay in registers during a block. With 16 to 256 rows on two cores with AVX2,
this takes less than half as long as unpacking weights into registers for every four rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lora_kernels.cpu.formats import Format, emit_load_number, emit_store
from lora_kernels.cpu.numba_panel import PanelLoads
from lora_kernels.cpu.quantized_panels import LINE, PANEL, PANEL_VECTORS, PanelForm
from lora_kernels.cpu.simd import F32, I64, LANES, VEC, Emit, has_wide_vectors

MOST_ROWS = 64
"""Most rows that share an unpacked block: their sums take 12 KiB of the first-level cache, and a block takes 6 KiB."""
ROW_BYTES = 4 * PANEL
"""Bytes of a row of sums, and of the weights of an input."""


TILE_ROWS, TILE_VECTORS = (8, PANEL_VECTORS) if has_wide_vectors() else (6, 1)
"""Rows and vectors of a tile, whose sums, weights and input fill the registers: 24 sums with AVX-512's 32 registers, or
six, each of which takes two of AVX2's 16."""


@intrinsic
def multiply_rows(typingctx, form, fmt, rows, x, x_row, w, blocks, bias, out, out_row, count, ahead):
    """Multiplies up to MOST_ROWS rows of x by a panel, adds the bias, and stores the first `count` columns. It
    prefetches the panel at `ahead`. Arrays are byte addresses."""

    def codegen(context, builder, signature, args):
        form, fmt = signature.args[0].of, signature.args[1].of
        _, _, rows, x, x_row, w, blocks, bias, out, out_row, count, ahead = args
        emit = Emit(builder)
        panel = PanelLoads(emit, form, w, blocks, ahead)
        unpacked = _Unpacked(emit, form, fmt, rows, x, x_row)
        unpacked.start(bias)
        groups = builder.udiv(blocks, ir.Constant(I64, form.blocks))
        with emit.loop(ir.Constant(I64, 0), groups, 1) as group:
            scales, minima = panel.scales(group)
            first = builder.mul(group, ir.Constant(I64, form.blocks))
            with emit.loop(first, builder.add(first, ir.Constant(I64, form.blocks)), 1) as block:
                unpacked.unpack(panel.weights(block, scales, minima))
                unpacked.multiply(block)
        unpacked.finish(out, out_row, count)

    return types.void(form, fmt, *[types.int64] * 10), codegen


class _Unpacked:
    """Emits the products of rows of x and blocks of unpacked weights."""

    def __init__(self, emit: Emit, form: PanelForm, fmt: Format, rows: Any, x: Any, x_row: Any) -> None:
        self._emit, self._form, self._fmt = emit, form, fmt
        self._rows, self._x, self._x_row = rows, x, x_row
        self._weights, self._sums = (self._memory(PANEL * count) for count in (form.block, MOST_ROWS))

    def _memory(self, numbers: int) -> Any:
        """Emits the allocation of fp32 numbers on the stack, and returns their address."""
        memory = cgutils.alloca_once(self._emit.builder, ir.ArrayType(F32, numbers))
        memory.align = LINE
        return self._emit.builder.ptrtoint(memory, I64)

    def _place(self, base: Any, row: Any, v: int) -> Any:
        """Emits the address of vector `v` of a row of weights or sums."""
        return self._emit.at(self._emit.offset(base, (row, ROW_BYTES), (LINE, v)), VEC)

    def start(self, bias: Any) -> None:
        """Emits the initialisation of each row's sums with the bias."""
        emit = self._emit
        with emit.loop(ir.Constant(I64, 0), self._rows, 1) as row:
            for v in range(PANEL_VECTORS):
                value = emit.raw(emit.offset(bias, (LINE, v)), VEC, None)
                emit.builder.store(
                    value, emit.at(emit.offset(self._sums, (row, ROW_BYTES), (LINE, v)), VEC), align=LINE
                )

    def unpack(self, weights: Any) -> None:
        """Emits stores of a block's fp32 weights to the memory from which `multiply` reads them, input by input."""
        for number, vectors in enumerate(weights):
            for v, vector in enumerate(vectors):
                self._emit.builder.store(vector, self._place(self._weights, number, v), align=LINE)

    def multiply(self, block: Any) -> None:
        """Emits the products of all rows and the unpacked block."""
        emit, builder = self._emit, self._emit.builder
        x = emit.offset(self._x, (block, self._form.block * self._fmt.size))
        with emit.loop(ir.Constant(I64, 0), self._rows, TILE_ROWS) as row:
            left = builder.sub(self._rows, row)
            with builder.if_else(builder.icmp_signed(">", left, ir.Constant(I64, TILE_ROWS // 2))) as (many, few):
                with many:
                    self._tile(x, row, TILE_ROWS)
                with few:
                    self._tile(x, row, TILE_ROWS // 2)

    def _tile(self, x: Any, first: Any, rows: int) -> None:
        """Emits the products of `rows` rows from `first` on. Those beyond the last row compute it again."""
        emit, builder = self._emit, self._emit.builder
        last = builder.sub(self._rows, ir.Constant(I64, 1))
        numbers = [builder.add(first, ir.Constant(I64, number)) for number in range(rows)]
        kept = [builder.select(builder.icmp_signed("<", number, last), number, last) for number in numbers]
        inputs = [emit.offset(x, (row, self._x_row)) for row in kept]
        for start in range(0, PANEL_VECTORS, TILE_VECTORS):
            self._columns(inputs, kept, range(start, start + TILE_VECTORS))

    def _columns(self, inputs: list[Any], rows: list[Any], vectors: range) -> None:
        """Emits the products of a tile: of the rows of x at the addresses `inputs` and the vectors `vectors` of the
        unpacked weights, which are added to the sums of the rows `rows`."""
        emit, builder = self._emit, self._emit.builder
        memory = [[self._place(self._sums, row, v) for v in vectors] for row in rows]
        registers = [[cgutils.alloca_once(builder, VEC) for _ in vectors] for _ in rows]
        for row, places in zip(memory, registers, strict=True):
            for address, place in zip(row, places, strict=True):
                builder.store(builder.load(address, align=LINE), place)
        with emit.loop(ir.Constant(I64, 0), ir.Constant(I64, self._form.block), 1) as k:
            weights = [builder.load(self._place(self._weights, k, v), align=LINE) for v in vectors]
            for x, places in zip(inputs, registers, strict=True):
                factor = emit.splat(emit_load_number(emit, self._fmt, emit.offset(x, (k, self._fmt.size))))
                for place, weight in zip(places, weights, strict=True):
                    builder.store(emit.fma(factor, weight, builder.load(place)), place)
        for row, places in zip(memory, registers, strict=True):
            for address, place in zip(row, places, strict=True):
                builder.store(builder.load(place), address, align=LINE)

    def finish(self, out: Any, out_row: Any, count: Any) -> None:
        emit, size = self._emit, self._fmt.size
        with emit.loop(ir.Constant(I64, 0), self._rows, 1) as row:
            for v in range(PANEL_VECTORS):
                left = emit.builder.sub(count, ir.Constant(I64, LANES * v))
                value = emit.builder.load(
                    emit.at(emit.offset(self._sums, (row, ROW_BYTES), (LINE, v)), VEC), align=LINE
                )
                emit_store(emit, self._fmt, emit.offset(out, (row, out_row), (size * LANES, v)), value, left)
