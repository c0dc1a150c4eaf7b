"""The number formats of tensors in memory, and loads and stores that convert them to and from fp32 vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_constant
from numba.extending import intrinsic, models, register_model, typeof_impl

from lora_kernels.cpu.simd import F32 as FLOAT
from lora_kernels.cpu.simd import I16, I32, I64, LANES, VEC, VEC_HALF, VEC_I16, VEC_I32, Emit, every, vector


class Constant(ABC):
    """Base class of values that numba compiles into functions as constants: each value has a numba type of its own."""

    @abstractmethod
    def key(self) -> str:
        """Return a text that differs for different values and is the same in every process. It is part of the value's
        numba type, by which numba finds compiled functions in its cache."""


class Format(Constant):
    """A number format in memory: F32, BF16 or F16, of `size` bytes. To numba functions it is a constant."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size

    def key(self) -> str:
        return self.name


F32, BF16, F16 = Format("f32", 4), Format("bf16", 2), Format("f16", 2)
FORMATS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}


class _ConstantType(types.Type):
    """The numba type of one `Constant`, which it holds as `of`. numba distinguishes types by their names."""

    def __init__(self, of: Constant) -> None:
        super().__init__(name=f"{type(of).__name__}({of.key()})")
        self.of: Any = of


register_model(_ConstantType)(models.OpaqueModel)


@typeof_impl.register(Constant)
def _typeof_constant(value: Constant, context: Any) -> _ConstantType:
    return _ConstantType(value)


@lower_constant(_ConstantType)
def _lower_constant(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.get_dummy_value()


def emit_load(emit: Emit, fmt: Format, address: Any, mask: Any = None) -> Any:
    """Emit a load of sixteen numbers in `fmt`, and return them as an fp32 vector. Lanes that `mask` excludes are not
    read, and are 0."""
    if fmt.name == "f32":
        return emit.raw(address, VEC, mask)
    bits = emit.raw(address, VEC_I16, mask)
    if fmt.name == "f16":
        return emit.builder.fpext(emit.builder.bitcast(bits, VEC_HALF), VEC)
    wide = emit.builder.shl(emit.builder.zext(bits, VEC_I32), every(16, VEC_I32))
    return emit.builder.bitcast(wide, VEC)


def emit_load_number(emit: Emit, fmt: Format, address: Any) -> Any:
    """Emit a load of one number in `fmt`, and return it as fp32."""
    builder = emit.builder
    if fmt.name == "f32":
        return builder.load(emit.at(address, FLOAT), align=4)
    bits = builder.load(emit.at(address, I16), align=2)
    if fmt.name == "f16":
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), FLOAT)
    return builder.bitcast(builder.shl(builder.zext(bits, I32), ir.Constant(I32, 16)), FLOAT)


def emit_bits(emit: Emit, fmt: Format, value: Any) -> Any:
    """Emit the conversion of an fp32 vector to the stored bits, rounded to nearest, ties to even; NaN stays NaN."""
    builder = emit.builder
    if fmt.name == "f32":
        return value
    if fmt.name == "f16":
        return builder.bitcast(builder.fptrunc(value, VEC_HALF), VEC_I16)
    bits = builder.bitcast(value, VEC_I32)
    odd = builder.and_(builder.lshr(bits, every(16, VEC_I32)), every(1, VEC_I32))
    rounded = builder.add(bits, builder.add(odd, every(0x7FFF, VEC_I32)))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), every(0x7FC00000, VEC_I32), rounded)
    return builder.trunc(builder.lshr(kept, every(16, VEC_I32)), VEC_I16)


def emit_store(emit: Emit, fmt: Format, address: Any, value: Any, count: Any) -> None:
    """Emit a store of the first min(`count`, 16) lanes of an fp32 vector, converted to `fmt`."""
    builder, bits = emit.builder, emit_bits(emit, fmt, value)
    pointer = emit.at(address, bits.type)
    with builder.if_else(builder.icmp_signed(">=", count, ir.Constant(I64, LANES))) as (full, tail):
        with full:
            builder.store(bits, pointer, align=fmt.size)
        with tail:
            name = f"llvm.masked.store.v{LANES}{'f32' if fmt.size == 4 else 'i16'}.p0"
            align = ir.Constant(I32, fmt.size)
            emit.call(name, ir.VoidType(), bits, pointer, align, emit.lanes_below(count))


@intrinsic
def size_of(typingctx, fmt):
    """Return the size in bytes of one number of format `fmt`."""
    return types.int64(fmt), lambda context, builder, signature, args: ir.Constant(I64, fmt.of.size)


@intrinsic
def read_as(typingctx, fmt, address):
    """Return the number at `address` in `fmt` as fp32."""

    def codegen(context, builder, signature, args):
        return emit_load_number(Emit(builder), signature.args[0].of, args[1])

    return types.float32(fmt, types.int64), codegen


@intrinsic
def load_as(typingctx, fmt, address, count):
    """Return the first min(`count`, 16) numbers at `address` in `fmt` as an fp32 vector, with other lanes 0."""

    def codegen(context, builder, signature, args):
        emit = Emit(builder)
        result = cgutils.alloca_once(builder, VEC)
        with builder.if_else(builder.icmp_signed(">=", args[2], ir.Constant(I64, LANES))) as (full, tail):
            with full:
                builder.store(emit_load(emit, fmt.of, args[1]), result)
            with tail:
                builder.store(emit_load(emit, fmt.of, args[1], emit.lanes_below(args[2])), result)
        return builder.load(result)

    return vector(fmt, types.int64, types.int64), codegen


@intrinsic
def store_as(typingctx, fmt, address, a, count):
    """Store the first min(`count`, 16) lanes of the fp32 vector `a` at `address` in `fmt`, rounded to nearest even."""

    def codegen(context, builder, signature, args):
        emit_store(Emit(builder), fmt.of, *args[1:])

    return types.void(fmt, types.int64, vector, types.int64), codegen


@intrinsic
def rounded(typingctx, fmt, a):
    """Round an fp32 vector to a format and convert it back to fp32, as a store and a load would."""

    def codegen(context, builder, signature, args):
        bits = emit_bits(Emit(builder), fmt.of, args[1])
        if fmt.of.name == "f32":
            return bits
        if fmt.of.name == "f16":
            return builder.fpext(builder.bitcast(bits, VEC_HALF), VEC)
        return builder.bitcast(builder.shl(builder.zext(bits, VEC_I32), every(16, VEC_I32)), VEC)

    return vector(fmt, vector), codegen
