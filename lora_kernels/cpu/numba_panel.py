"""Loads of a panel of quantised weights (see quantized_panels.py) into registers, for kernels that numba compiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from lora_kernels.cpu.quantized_panels import HALF_BITS, LINE, PANEL, PANEL_VECTORS, QUAD, PanelForm
from lora_kernels.cpu.simd import I64, LANES, VEC, VEC_BYTES, VEC_HALF, VEC_I16, VEC_I32, Emit, every


class PanelLoads:
    """Emits code that loads the panel at the address `w`, and that prefetches the panel at `ahead`."""

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
        """Emit loads of a group's scales and minima, and return them as fp32 vectors. Minima, the weights of code 0,
        are None if they are 0 or if products of integers account for the coding's zero."""
        coding, builder = self._form.coding, self._emit.builder
        scales = self._numbers(self._scales, self._units, group)
        if coding.zero is None:
            minima = self._numbers(self._minima, self._minima_units, group)
            if coding.in_scales:
                minima = [builder.fmul(low, scale) for low, scale in zip(minima, scales, strict=True)]
            return scales, minima
        if self._form.code_bits or not coding.zero:
            return scales, None
        return scales, [builder.fmul(scale, every(-float(coding.zero), VEC)) for scale in scales]

    def _numbers(self, plane: Any, units: Any, group: Any) -> list[Any]:
        """Emit loads of a group's scales or minima (`plane`), multiplied by their units if there are any."""
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

    def quads(self, block: Any) -> Iterator[list[Any]]:
        """Emit loads of a block's codes, and yield the vectors of each quad, one byte a code."""
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
        """Emit the extraction of `bits` bits of each byte, from bit `shift` on."""
        builder = self._emit.builder
        moved = builder.lshr(vector, every(shift, VEC_I32)) if shift else vector
        return builder.and_(moved, every((2**bits - 1) * 0x01010101, VEC_I32))

    def weights(self, block: Any, scales: list[Any], minima: list[Any] | None) -> Iterator[list[Any]]:
        """Emit a block's weights as fp32 vectors, and yield those of each input."""
        builder = self._emit.builder
        for codes in self.quads(block):
            for k in range(QUAD):
                found = []
                for v, code in enumerate(codes):
                    byte = builder.and_(builder.lshr(code, every(8 * k, VEC_I32)), every(255, VEC_I32))
                    low = every(0.0, VEC) if minima is None else minima[v]
                    found.append(self._emit.fma(builder.sitofp(byte, VEC), scales[v], low))
                yield found
