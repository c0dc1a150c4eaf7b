"""Codes activations in 8 or 16 bits, with a scale for each block of inputs, for products in integers."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import Format, emit_load
from lora_kernels.cpu.openmp import ITEM, TICKETS, Kernel
from lora_kernels.cpu.quantized_panels import PanelForm
from lora_kernels.cpu.simd import F32, I32, LANES, VEC, VEC_BYTES, VEC_I16, VEC_I32, Emit, every

LARGEST = {8: 127, 16: 32767}
"""Largest magnitude of a code, by its bits."""


class CodeBlock(ctypes.Structure):
    """Argument block of the coding of activations: addresses, and strides in bytes."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("rows", "item_rows", "x", "x_row", "blocks", "out", "out_row")),
    ]


@cache
def code_kernel(form: PanelForm, fmt: Format) -> Kernel:
    """Return the kernel that codes rows of activations in `fmt` in blocks of `form`, compiled on first use."""

    size, width, code_bytes = fmt.size, form.block, form.code_bits // 8

    def code(pointer):
        block = carray(pointer, 1)[0]
        item = simd.take_ticket(pointer, ITEM)
        while item * block.item_rows < block.rows:
            for row in range(item * block.item_rows, min((item + 1) * block.item_rows, block.rows)):
                x, out = block.x + row * block.x_row, block.out + row * block.out_row
                for n in range(block.blocks):
                    facts = out + block.blocks * width * code_bytes + 8 * n
                    _code(form, fmt, x + n * width * size, out + n * width * code_bytes, facts)
            item = simd.take_ticket(pointer, ITEM)

    return Kernel(code, CodeBlock)


@intrinsic
def _code(typingctx, form, fmt, x, codes, facts):
    """Code a block of activations in `fmt` at `x`: write their codes to `codes`, and to `facts` the scale (fp32) and
    the sum of the codes (int32). The scale is not finite if a number is not."""

    # Of four codes of 16 bits, the second and the third change places (see integer_sums.py).
    def codegen(context, builder, signature, args):
        form, fmt = signature.args[0].of, signature.args[1].of
        _, _, x, codes, facts = args
        emit, largest_code = Emit(builder), LARGEST[form.code_bits]
        places = range(0, form.block, LANES)
        values = [emit_load(emit, fmt, emit.offset(x, (1, place * fmt.size))) for place in places]
        # Magnitudes are compared as integers: then infinity is larger than all numbers, and NaN larger than infinity.
        sizes = [builder.and_(builder.bitcast(value, VEC_I32), every(0x7FFFFFFF, VEC_I32)) for value in values]
        largest = sizes[0]
        for size in sizes[1:]:
            largest = builder.select(builder.icmp_signed(">", size, largest), size, largest)
        top = builder.bitcast(emit.call("llvm.vector.reduce.smax.v16i32", I32, largest), F32)
        inverse = builder.fdiv(ir.Constant(F32, float(largest_code)), top)
        is_normal = builder.fcmp_ordered("<", ir.Constant(F32, 1e-30), top)
        factor = emit.splat(builder.select(is_normal, inverse, ir.Constant(F32, 0.0)))
        total = every(0, VEC_I32)
        for place, value in zip(places, values, strict=True):
            whole = emit.call("llvm.rint.v16f32", VEC, builder.fmul(value, factor))
            code = builder.fptosi(whole, VEC_I32)
            stored = _stored(emit, code, form.code_bits)
            address = emit.offset(codes, (form.code_bits // 8, place))
            builder.store(stored, emit.at(address, stored.type), align=form.code_bits // 8)
            total = builder.add(total, code)
        scale = builder.fmul(top, ir.Constant(F32, 1 / largest_code))
        builder.store(scale, emit.at(facts, F32), align=4)
        count = emit.call("llvm.vector.reduce.add.v16i32", I32, total)
        builder.store(count, emit.at(emit.offset(facts, (4, 1)), I32), align=4)

    return types.void(form, fmt, types.int64, types.int64, types.int64), codegen


def _stored(emit: Emit, code: Any, bits: int) -> Any:
    """Emit the conversion of sixteen codes, int32, to what is stored of them."""
    if bits == 8:
        return emit.builder.trunc(code, VEC_BYTES)
    words = emit.builder.trunc(code, VEC_I16)
    return emit.shuffle(words, words, [quad + lane for quad in range(0, LANES, 4) for lane in (0, 2, 1, 3)])
