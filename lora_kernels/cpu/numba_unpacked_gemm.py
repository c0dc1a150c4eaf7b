"""Products of several rows and a panel of quantised weights, of which each block of inputs is unpacked once for up to
64 rows. With 16 rows and more, this takes less than half as long as unpacking into registers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lora_kernels.cpu.formats import Format, emit_load_number, emit_store
from lora_kernels.cpu.integer_sums import CodedBlock, integer_sums
from lora_kernels.cpu.numba_panel import PanelLoads
from lora_kernels.cpu.quantized_panels import LINE, PANEL, PANEL_VECTORS, PanelForm
from lora_kernels.cpu.simd import F32, I32, I64, LANES, VEC, VEC_I32, Emit, has_wide_vectors

MOST_ROWS = 64
"""Most rows that share an unpacked block: their sums take 12 KiB of the first-level cache, and a block takes 6 KiB."""
ROW_BYTES = 4 * PANEL
"""Bytes of a row of sums, of the fp32 weights of an input, and of the codes of two or four inputs."""
TILE_ROWS, TILE_VECTORS = (8, PANEL_VECTORS) if has_wide_vectors() else (6, 1)
"""Rows and vectors of a tile, whose sums, weights and input fill the registers: 24 sums with AVX-512's 32 registers, or
six, each of which takes two of AVX2's 16."""


@intrinsic
def multiply_rows(typingctx, form, fmt, rows, x, x_row, w, blocks, bias, out, out_row, count, ahead):
    """Multiply up to MOST_ROWS rows of x by a panel, add the bias, and store the first `count` columns. It prefetches
    the panel at `ahead`. Arrays are byte addresses."""

    def codegen(context, builder, signature, args):
        form, fmt = signature.args[0].of, signature.args[1].of
        _, _, rows, x, x_row, w, blocks, bias, out, out_row, count, ahead = args
        emit = Emit(builder)
        panel = PanelLoads(emit, form, w, blocks, ahead)
        unpacked = (_Codes if form.code_bits else _Floats)(emit, form, fmt, rows, x, x_row, blocks)
        unpacked.start(bias)
        groups = builder.udiv(blocks, ir.Constant(I64, form.blocks))
        with emit.loop(ir.Constant(I64, 0), groups, 1) as group:
            scales, minima = panel.scales(group)
            first = builder.mul(group, ir.Constant(I64, form.blocks))
            with emit.loop(first, builder.add(first, ir.Constant(I64, form.blocks)), 1) as block:
                unpacked.unpack(panel, _Block(block, scales, minima))
                unpacked.multiply(_Block(block, scales, minima))
        unpacked.finish(out, out_row, count)

    return types.void(form, fmt, *[types.int64] * 10), codegen


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of a panel: its number, and the scales and minima of its group."""

    number: Any
    scales: list[Any]
    minima: list[Any] | None


class _Unpacked(ABC):
    """Emits the products of rows of x and blocks of unpacked weights."""

    def __init__(self, emit: Emit, form: PanelForm, fmt: Format, rows: Any, x: Any, x_row: Any, blocks: Any) -> None:
        self._emit, self._form, self._fmt = emit, form, fmt
        self._rows, self._x, self._x_row, self._blocks = rows, x, x_row, blocks
        # A row of unpacked weights has those of as many inputs as four bytes hold.
        self._rows_of_block = form.block * form.code_bits // 32 if form.code_bits else form.block
        self._weights, self._sums = (
            self._memory(PANEL * count) for count in (self._rows_of_block, MOST_ROWS + TILE_ROWS)
        )

    @abstractmethod
    def unpack(self, panel: PanelLoads, block: _Block) -> None:
        """Emit stores of a block's weights to the memory from which `multiply` reads them, input by input."""

    @abstractmethod
    def _columns(self, block: _Block, inputs: list[Any], sums: Any, vectors: range) -> None:
        """Emit the products of a tile: of the rows of x at the addresses `inputs` and the vectors `vectors` of the
        unpacked weights, which are added to the rows' sums at the address `sums`."""

    def _memory(self, numbers: int) -> Any:
        """Emit the allocation of fp32 numbers on the stack, and return their address."""
        memory = cgutils.alloca_once(self._emit.builder, ir.ArrayType(F32, numbers))
        memory.align = LINE
        return self._emit.builder.ptrtoint(memory, I64)

    def _place(self, base: Any, row: Any, v: int) -> Any:
        """Emit the address of vector `v` of a row of weights or sums."""
        return self._emit.at(self._emit.offset(base, (row, ROW_BYTES), (LINE, v)), VEC)

    def start(self, bias: Any) -> None:
        """Emit the initialisation of each row's sums with the bias."""
        emit = self._emit
        with emit.loop(ir.Constant(I64, 0), self._rows, 1) as row:
            for v in range(PANEL_VECTORS):
                value = emit.raw(emit.offset(bias, (LINE, v)), VEC, None)
                emit.builder.store(
                    value, emit.at(emit.offset(self._sums, (row, ROW_BYTES), (LINE, v)), VEC), align=LINE
                )

    def multiply(self, block: _Block) -> None:
        """Emit the products of all rows and the unpacked block."""
        emit, builder = self._emit, self._emit.builder
        with emit.loop(ir.Constant(I64, 0), self._rows, TILE_ROWS) as row:
            left = builder.sub(self._rows, row)
            with builder.if_else(builder.icmp_signed(">", left, ir.Constant(I64, TILE_ROWS // 2))) as (many, few):
                with many:
                    self._tile(block, row, TILE_ROWS)
                with few:
                    self._tile(block, row, TILE_ROWS // 2)

    def _tile(self, block: _Block, first: Any, rows: int) -> None:
        """Emit the products of `rows` rows from `first` on. Those beyond the last row read it again, and have sums of
        their own that are not used."""
        emit, builder = self._emit, self._emit.builder
        last = builder.sub(self._rows, ir.Constant(I64, 1))
        numbers = [builder.add(first, ir.Constant(I64, number)) for number in range(rows)]
        kept = [builder.select(builder.icmp_signed("<", number, last), number, last) for number in numbers]
        inputs = [emit.offset(self._x, (row, self._x_row)) for row in kept]
        sums = emit.offset(self._sums, (first, ROW_BYTES))
        for start in range(0, PANEL_VECTORS, TILE_VECTORS):
            self._columns(block, inputs, sums, range(start, start + TILE_VECTORS))

    def finish(self, out: Any, out_row: Any, count: Any) -> None:
        emit, size = self._emit, self._fmt.size
        with emit.loop(ir.Constant(I64, 0), self._rows, 1) as row:
            for v in range(PANEL_VECTORS):
                left = emit.builder.sub(count, ir.Constant(I64, LANES * v))
                value = emit.builder.load(
                    emit.at(emit.offset(self._sums, (row, ROW_BYTES), (LINE, v)), VEC), align=LINE
                )
                emit_store(emit, self._fmt, emit.offset(out, (row, out_row), (size * LANES, v)), value, left)


class _Floats(_Unpacked):
    """Emits products of numbers and fp32 weights."""

    def unpack(self, panel: PanelLoads, block: _Block) -> None:
        for number, vectors in enumerate(panel.weights(block.number, block.scales, block.minima)):
            for v, vector in enumerate(vectors):
                self._emit.builder.store(vector, self._place(self._weights, number, v), align=LINE)

    def _columns(self, block: _Block, inputs: list[Any], sums: Any, vectors: range) -> None:
        emit, builder, size = self._emit, self._emit.builder, self._fmt.size
        inputs = [emit.offset(x, (block.number, self._form.block * size)) for x in inputs]
        memory = [[self._place(sums, row, v) for v in vectors] for row in range(len(inputs))]
        registers = [[cgutils.alloca_once(builder, VEC) for _ in vectors] for _ in inputs]
        for row, places in zip(memory, registers, strict=True):
            for address, place in zip(row, places, strict=True):
                builder.store(builder.load(address, align=LINE), place)
        with emit.loop(ir.Constant(I64, 0), ir.Constant(I64, self._rows_of_block), 1) as k:
            weights = [builder.load(self._place(self._weights, k, v), align=LINE) for v in vectors]
            for x, places in zip(inputs, registers, strict=True):
                factor = emit.splat(emit_load_number(emit, self._fmt, emit.offset(x, (k, size))))
                for place, weight in zip(places, weights, strict=True):
                    builder.store(emit.fma(factor, weight, builder.load(place)), place)
        for row, places in zip(memory, registers, strict=True):
            for address, place in zip(row, places, strict=True):
                builder.store(builder.load(place), address, align=LINE)


class _Codes(_Unpacked):
    """Emits products in integers, of activations and weights in codes."""

    def __init__(self, emit: Emit, form: PanelForm, *places: Any) -> None:
        super().__init__(emit, form, *places)
        self._integers = integer_sums(emit, form)

    def unpack(self, panel: PanelLoads, block: _Block) -> None:
        number = 0
        for quad in panel.quads(block.number):
            for vectors in zip(*map(self._integers.operands, quad), strict=True):
                for v, vector in enumerate(vectors):
                    self._emit.builder.store(vector, self._codes(number, v), align=LINE)
                number += 1

    def _columns(self, block: _Block, inputs: list[Any], sums: Any, vectors: range) -> None:
        emit, builder, size = self._emit, self._emit.builder, self._form.block * self._form.code_bits // 8
        coded = [CodedBlock(emit, emit.offset(x, (self._blocks, size), (block.number, 8))) for x in inputs]
        registers = [[cgutils.alloca_once(builder, VEC_I32) for _ in vectors] for _ in inputs]
        for one, places in zip(coded, registers, strict=True):
            for place in places:
                builder.store(self._integers.start(one), place)
        with emit.loop(ir.Constant(I64, 0), ir.Constant(I64, self._rows_of_block), 1) as k:
            weights = [builder.load(self._codes(k, v), align=LINE) for v in vectors]
            for x, places in zip(inputs, registers, strict=True):
                four = builder.load(emit.at(emit.offset(x, (block.number, size), (k, 4)), I32), align=1)
                for place, weight in zip(places, weights, strict=True):
                    builder.store(self._integers.add(builder.load(place), weight, emit.splat_int(four)), place)
        for row, (one, places) in enumerate(zip(coded, registers, strict=True)):
            for v, place in zip(vectors, places, strict=True):
                address, minimum = self._place(sums, row, v), block.minima and block.minima[v]
                found = self._integers.end(one, builder.load(place))
                result = one.add(builder.load(address, align=LINE), found, block.scales[v], minimum)
                builder.store(result, address, align=LINE)

    def _codes(self, row: Any, v: int) -> Any:
        """Emit the address of vector `v` of a row of unpacked codes."""
        return self._emit.builder.bitcast(self._place(self._weights, row, v), VEC_I32.as_pointer())
