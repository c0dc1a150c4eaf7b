"""Reads single outputs of a quantised weight out of its panels, as an embedding needs them."""

from __future__ import annotations

import ctypes
from functools import cache

from numba import carray

from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import F16, read_as
from lora_kernels.cpu.openmp import ITEM, TICKETS, Kernel
from lora_kernels.cpu.quantized_panels import HALF_BITS, PANEL, QUAD, PanelForm
from lora_kernels.quantized import Coding


class RowsBlock(ctypes.Structure):
    """Argument block of the kernel that reads outputs: addresses, and strides in bytes. `numbers` points to the indices
    (int64) of the outputs to read; `blocks` is the number of blocks of an output."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("rows", "numbers", "w", "panel_bytes", "blocks", "out", "out_row")),
    ]


@simd.inner
def _number(shared, plane, units, group, lane):
    """Return the scale or minimum in `group` of the output at place `lane` of a panel. `plane` is the address of the
    panel's numbers, and `units` that of their units, which is read only if `shared` is not 0."""
    if shared:
        unit = read_as(F16, units + (group // shared * PANEL + lane) * 2)
        return simd.read_i8(plane + group * PANEL + lane) * unit
    return read_as(F16, plane + (group * PANEL + lane) * 2)


@cache
def rows_kernel(coding: Coding) -> Kernel:
    """Return the kernel that dequantises single outputs of a weight, whose panels are in this coding, and write them as
    fp32 rows. It is compiled on first use."""
    form = PanelForm(coding, code_bits=0)
    block_bytes, upper_bytes, blocks_of_group = form.block_bytes, form.upper_bytes, form.blocks
    quads, in_vector, upper_bits = form.block // QUAD, form.quads_in_vector, form.upper_bits
    has_minima, in_scales, zero, shared = form.has_minima, coding.in_scales, coding.zero or 0, coding.shared
    scale_bytes = form.scale_bytes
    in_upper = 8 // upper_bits if upper_bits else 1
    mask, upper_mask = (255 if in_vector == 1 else 15), (1 << upper_bits) - 1

    def read(pointer):
        block = carray(pointer, 1)[0]
        row = simd.take_ticket(pointer, ITEM)
        while row < block.rows:
            number, out = simd.read_i64(block.numbers + 8 * row), block.out + row * block.out_row
            lane = number % PANEL
            lower = block.w + number // PANEL * block.panel_bytes + QUAD * lane
            upper = lower + block.blocks * block_bytes
            groups = block.blocks // blocks_of_group
            scales = upper + block.blocks * upper_bytes - QUAD * lane
            minima = scales + groups * scale_bytes * PANEL
            units = minima + (groups * scale_bytes * PANEL if has_minima else 0)
            for n in range(block.blocks):
                group = n // blocks_of_group
                scale = _number(shared, scales, units, group, lane)
                low = -zero * scale
                if has_minima:
                    minima_units = units + groups // max(shared, 1) * 2 * PANEL
                    low = _number(shared, minima, minima_units, group, lane) * (scale if in_scales else 1.0)
                for quad in range(quads):
                    word = simd.read_i32(lower + n * block_bytes + quad // in_vector * QUAD * PANEL)
                    word >>= HALF_BITS * (quad % in_vector)
                    top = 0
                    if upper_bits:
                        top = simd.read_i32(upper + n * upper_bytes + quad // in_upper * QUAD * PANEL)
                        top >>= upper_bits * (quad % in_upper)
                    for k in range(QUAD):
                        code = (word >> 8 * k) & mask | ((top >> 8 * k) & upper_mask) << HALF_BITS
                        simd.write_f32(out + 4 * ((n * quads + quad) * QUAD + k), code * scale + low)
            row = simd.take_ticket(pointer, ITEM)

    return Kernel(read, RowsBlock)
