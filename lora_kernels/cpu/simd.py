"""Vectors of sixteen fp32 numbers for numba functions: intrinsics that LLVM turns into AVX-512, AVX2 or NEON. Addresses
are int64 byte addresses, on which kernels do their own arithmetic; nothing checks bounds."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

BYTE, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VEC, VEC_I16, VEC_I32 = ir.VectorType(F32, LANES), ir.VectorType(I16, LANES), ir.VectorType(I32, LANES)
VEC_HALF, VEC_BYTES = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(BYTE, LANES)


class _Vector(types.Type):
    """The numba type of a vector of sixteen fp32 numbers in a register."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VEC)


vector = _Vector()


def has_wide_vectors() -> bool:
    """Return whether a vector fits into one of 32 registers (AVX-512). Elsewhere it takes two of AVX2's 16, or four of
    NEON's 32."""
    return "+avx512f" in numba.core.codegen.get_host_cpu_features()


@dataclass(frozen=True)
class Emit:
    """Emits LLVM instructions on vectors through a builder."""

    builder: Any

    def call(self, name: str, result: Any, *args: Any, fastmath: tuple[str, ...] = ()) -> Any:
        function_type = ir.FunctionType(result, [arg.type for arg in args])
        function = self.builder.module.globals.get(name) or ir.Function(self.builder.module, function_type, name)
        return self.builder.call(function, args, fastmath=fastmath)

    def at(self, address: Any, pointee: Any) -> Any:
        return self.builder.inttoptr(address, pointee.as_pointer())

    def splat(self, number: Any) -> Any:
        one = self.builder.insert_element(ir.Constant(VEC, ir.Undefined), number, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, ir.Constant(VEC, ir.Undefined), every(0, VEC_I32))

    def splat_int(self, number: Any) -> Any:
        one = self.builder.insert_element(ir.Constant(VEC_I32, ir.Undefined), number, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, ir.Constant(VEC_I32, ir.Undefined), every(0, VEC_I32))

    def prefetch(self, address: Any) -> None:
        """Prefetch the cache line at an address into the second-level cache."""
        hints = (ir.Constant(I32, number) for number in (0, 2, 1))
        self.call("llvm.prefetch.p0", ir.VoidType(), self.at(address, BYTE), *hints)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call("llvm.fma.v16f32", VEC, a, b, c)

    def raw(self, address: Any, of: Any, mask: Any | None) -> Any:
        """Return a vector of type `of` loaded from `address`. Lanes that `mask` excludes are 0 and are not read."""
        size = of.element.width // 8 if isinstance(of.element, ir.IntType) else 4
        pointer = self.at(address, of)
        if mask is None:
            return self.builder.load(pointer, align=size)
        name = f"llvm.masked.load.v{LANES}{'i16' if size == 2 else 'f32'}.p0"
        return self.call(name, of, pointer, ir.Constant(I32, size), mask, every(0, of))

    def lanes_below(self, count: Any) -> Any:
        """Return a mask that selects the first `count` lanes."""
        counts = self.splat_int(self.builder.trunc(count, I32))
        return self.builder.icmp_signed("<", ir.Constant(VEC_I32, [*range(LANES)]), counts)

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))

    def totals(self, vectors: list[Any]) -> Any:
        """Return the sums of the lanes of four vectors, as one vector of four. Lanes are interleaved before they are
        added, which is cheaper than one sum per vector."""
        groups = range(0, LANES, 4)
        low, even = ([group + lane + of for group in groups for of in (0, LANES) for lane in lanes]
                     for lanes in ((0, 1), (0, 2)))  # fmt: skip
        high, odd = [lane + 2 for lane in low], [lane + 1 for lane in even]
        ab, cd = (
            self.builder.fadd(self.shuffle(x, y, low), self.shuffle(x, y, high)) for x, y in (vectors[:2], vectors[2:])
        )
        sums = self.builder.fadd(self.shuffle(ab, cd, even), self.shuffle(ab, cd, odd))
        for half in (8, 4):
            sides = ([*range(half)], [*range(half, 2 * half)])
            sums = self.builder.fadd(*(self.shuffle(sums, sums, side) for side in sides))
        return sums

    @contextmanager
    def loop(self, start: Any, stop: Any, step: int) -> Any:
        """Emit a loop over an int64 counter in [start, stop), and yield the counter. The context emits the body."""
        with cgutils.for_range_slice(self.builder, start, stop, ir.Constant(I64, step), inc=True) as (index, _):
            yield index

    def offset(self, base: Any, *terms: tuple[Any, Any]) -> Any:
        for a, b in terms:
            base = self.builder.add(base, self.builder.mul(_int(a), _int(b)))
        return base


def _int(value: Any) -> Any:
    return ir.Constant(I64, value) if isinstance(value, int) else value


def every(value: Any, of: ir.VectorType) -> ir.Constant:
    """Return a constant vector of type `of` with `value` in every lane."""
    return ir.Constant(of, [value] * LANES)


_INNER: dict[str, Any] = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner: Any = numba.njit(**_INNER)
"""Decorates functions that only kernels call. numba compiles two more functions beside each one, by which Python and C
could call it, unless it is told not to."""
inlined: Any = numba.njit(inline="always", **_INNER)
"""Decorates an inner function that becomes a part of its only caller before types are inferred. LLVM would optimise it
by itself and then again within each caller: so near the top of a kernel, that takes a second."""


@intrinsic
def load(typingctx, address):
    """Return the sixteen fp32 numbers at a byte address as a vector."""
    return vector(types.int64), lambda context, builder, signature, args: Emit(builder).raw(args[0], VEC, None)


@intrinsic
def store(typingctx, address, a):
    """Store the sixteen fp32 numbers of `a` at a byte address."""

    def codegen(context, builder, signature, args):
        builder.store(args[1], Emit(builder).at(args[0], VEC), align=4)

    return types.void(types.int64, vector), codegen


@intrinsic
def splat(typingctx, number):
    """Return a vector with `number` in every lane."""
    return vector(types.float32), lambda context, builder, signature, args: Emit(builder).splat(args[0])


@intrinsic
def fma(typingctx, a, b, c):
    """Return a * b + c, rounded once."""
    return vector(vector, vector, vector), lambda context, builder, signature, args: Emit(builder).fma(*args)


@intrinsic
def add(typingctx, a, b):
    return vector(vector, vector), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def mul(typingctx, a, b):
    return vector(vector, vector), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def div(typingctx, a, b):
    return vector(vector, vector), lambda context, builder, signature, args: builder.fdiv(*args)


@intrinsic
def maximum(typingctx, a, b):
    """Return the larger number of each lane. If either number is NaN, the result is the lane of `b`."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), codegen


@intrinsic
def minimum(typingctx, a, b):
    """Return the smaller number of each lane. If either number is NaN, the result is the lane of `b`."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return vector(vector, vector), codegen


@intrinsic
def total(typingctx, a):
    """Return the sum of the lanes, fp32, added as a tree."""

    def codegen(context, builder, signature, args):
        zero = ir.Constant(F32, -0.0)
        return Emit(builder).call("llvm.vector.reduce.fadd.v16f32", F32, zero, args[0], fastmath=("reassoc",))

    return types.float32(vector), codegen


@intrinsic
def largest(typingctx, a):
    def codegen(context, builder, signature, args):
        return Emit(builder).call("llvm.vector.reduce.fmax.v16f32", F32, args[0], fastmath=("nnan",))

    return types.float32(vector), codegen


@intrinsic
def first(typingctx, a):
    """Return lane 0 as fp32."""

    def codegen(context, builder, signature, args):
        return builder.extract_element(args[0], ir.Constant(I32, 0))

    return types.float32(vector), codegen


@intrinsic
def exp(typingctx, a):
    """Return e to the power of each lane, with a relative error below 1e-7. Lanes below -87 give 0, and lanes above 88
    give e to the power of 88; NaN stays NaN."""

    def codegen(context, builder, signature, args):
        emit = Emit(builder)
        low = builder.fcmp_ordered("<", args[0], every(-87.0, VEC))
        x = builder.select(low, every(-87.0, VEC), args[0])
        x = builder.select(builder.fcmp_ordered(">", x, every(88.0, VEC)), every(88.0, VEC), x)
        whole = emit.call("llvm.rint.v16f32", VEC, builder.fmul(x, every(1.4426950408889634, VEC)))
        rest = emit.fma(whole, every(-0.693145751953125, VEC), x)
        rest = emit.fma(whole, every(-1.428606765330187e-06, VEC), rest)
        result = every(1 / 5040, VEC)
        for factor in (720, 120, 24, 6, 2, 1, 1):
            result = emit.fma(result, rest, every(1 / factor, VEC))
        power = builder.shl(emit.call("llvm.fptosi.sat.v16i32.v16f32", VEC_I32, whole), every(23, VEC_I32))
        result = builder.bitcast(builder.add(builder.bitcast(result, VEC_I32), power), VEC)
        return builder.select(low, every(0.0, VEC), result)

    return vector(vector), codegen


@intrinsic
def read_f32(typingctx, address):
    """Return the fp32 number at a byte address."""

    def codegen(context, builder, signature, args):
        return builder.load(Emit(builder).at(args[0], F32), align=4)

    return types.float32(types.int64), codegen


@intrinsic
def fp32_of(typingctx, bits):
    """Return the fp32 number that has the bits of an int32."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], F32)


@intrinsic
def write_f32(typingctx, address, number):
    def codegen(context, builder, signature, args):
        builder.store(args[1], Emit(builder).at(args[0], F32), align=4)

    return types.void(types.int64, types.float32), codegen


def _make_reader(of: Any) -> Any:
    """Make an intrinsic that returns the signed integer of type `of` at a byte address."""

    def codegen(context, builder, signature, args):
        return builder.sext(builder.load(Emit(builder).at(args[0], of), align=of.width // 8), I64)

    @intrinsic
    def read(typingctx, address):
        return types.int64(types.int64), codegen

    return read


read_i8, read_i32, read_i64 = _make_reader(BYTE), _make_reader(I32), _make_reader(I64)


def _make_pointer(number: types.Type) -> Any:
    """Make an intrinsic that turns an address into a pointer to numbers of this numba type."""
    pointer = types.CPointer(number)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    @intrinsic
    def at(typingctx, address):
        return pointer(types.int64), codegen

    return at


int32_at, int64_at, fp32_at, fp64_at = map(_make_pointer, (types.int32, types.int64, types.float32, types.float64))


@intrinsic
def prefetch(typingctx, address):
    """Prefetch the cache line at an address into the second-level cache."""

    def codegen(context, builder, signature, args):
        Emit(builder).prefetch(args[0])

    return types.void(types.int64), codegen


@intrinsic
def take_ticket(typingctx, block, index):
    """Atomically adds 1 to int64 number `index` of an argument block, and returns its old value. Threads of a team use
    it to share out work."""

    def codegen(context, builder, signature, args):
        place = builder.gep(builder.bitcast(args[0], I64.as_pointer()), [args[1]], source_etype=I64)
        return builder.atomic_rmw("add", place, ir.Constant(I64, 1), "monotonic")

    return types.int64(block, types.int64), codegen


@intrinsic
def stay_apart(typingctx):
    """Prevent LLVM from inlining the calling function. Each of its callers would optimise it again, which takes seconds
    of compile time."""

    def codegen(context, builder, signature, args):
        builder.function.attributes.add("noinline")

    return types.void(), codegen
