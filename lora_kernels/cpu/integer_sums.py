"""Sums of products of coded activations and coded weights, for kernels that numba compiles. A lane of a vector belongs
to an output; an instruction adds to it the products of two inputs in 16 bits, or of four in 8."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from llvmlite import ir

from lora_kernels.cpu.quantized_panels import PanelForm
from lora_kernels.cpu.simd import BYTE, F32, I16, I32, LANES, VEC, VEC_I32, Emit, every, has_wide_vectors

WORDS = ir.VectorType(I16, 2 * LANES)
ONES = every(0x00010001, VEC_I32)
"""Pairs of words that are 1: a product with these adds the two words of each pair."""


class CodedBlock:
    """Emits what products in integers need of a block of a coded row, whose scale and sum of codes are at `facts`."""

    def __init__(self, emit: Emit, facts: Any) -> None:
        self._emit, builder = emit, emit.builder
        self._scale = builder.load(emit.at(facts, F32), align=4)
        self._total = builder.load(emit.at(emit.offset(facts, (4, 1)), I32), align=4)

    def start(self, zero: int) -> Any:
        """Emit the vector with which sums of products begin, so that they end as if the weights' codes were smaller by
        `zero`."""
        return self._emit.splat_int(self._emit.builder.mul(self._total, ir.Constant(I32, -zero)))

    def add(self, result: Any, sums: Any, scale: Any, minimum: Any | None) -> Any:
        """Emit `result`, an fp32 vector, plus the block's products: `sums` of integers, multiplied by the scales of x
        and of the weights, and the minima of the weights, if there are any, times the sum of x."""
        emit, builder = self._emit, self._emit.builder
        found = emit.fma(builder.fmul(builder.sitofp(sums, VEC), emit.splat(self._scale)), scale, result)
        if minimum is None:
            return found
        return emit.fma(emit.splat(builder.fmul(self._scale, builder.sitofp(self._total, F32))), minimum, found)


class IntegerSums(ABC):
    """Emits the sums of a block's products by one instruction set. Vectors have int32 lanes, whatever they hold."""

    def __init__(self, emit: Emit, form: PanelForm) -> None:
        self._emit, self._zero = emit, form.coding.zero or 0

    def operands(self, codes: Any) -> list[Any]:
        """Emit the vectors by which activations are multiplied, from the codes of a quad, one byte each. The first four
        bytes of a row's codes belong to the first vector, and so on."""
        return [codes]

    def start(self, coded: CodedBlock) -> Any:
        """Emit the vector with which the sums of a row begin."""
        return coded.start(self._zero)

    @abstractmethod
    def add(self, sums: Any, operand: Any, x: Any) -> Any:
        """Emit `sums` plus the products of an operand and of four bytes of a row's codes, which each lane of `x`
        has."""

    def end(self, coded: CodedBlock, sums: Any) -> Any:
        """Emit the block's sums, int32."""
        return sums


class _VnniBytes(IntegerSums):
    """Activations in 8 bits, with AVX512-VNNI."""

    def add(self, sums: Any, operand: Any, x: Any) -> Any:
        return self._emit.call("llvm.x86.avx512.vpdpbusd.512", VEC_I32, sums, operand, x)


class _Bytes(IntegerSums):
    """Activations in 8 bits and weights in 4, with AVX2. Two sums of 16 bits in a lane hold the products of a block:
    each is at most 16 x 127 x 15."""

    def start(self, coded: CodedBlock) -> Any:
        return every(0, VEC_I32)

    def add(self, sums: Any, operand: Any, x: Any) -> Any:
        products = _in_halves(self._emit, "llvm.x86.avx2.pmadd.ub.sw", BYTE, ir.VectorType(I16, LANES), operand, x)
        builder = self._emit.builder
        return builder.bitcast(builder.add(builder.bitcast(sums, WORDS), builder.bitcast(products, WORDS)), VEC_I32)

    def end(self, coded: CodedBlock, sums: Any) -> Any:
        return _add_words(self._emit, super().start(coded), sums, ONES)


class _Words(IntegerSums):
    """Activations in 16 bits, with AVX2."""

    def operands(self, codes: Any) -> list[Any]:
        """Emit the words of the first and third inputs of a quad, and of its second and fourth. To keep inputs in order
        would take more instructions; activations are coded in this order instead."""
        builder = self._emit.builder
        odd = builder.lshr(builder.bitcast(codes, WORDS), ir.Constant(WORDS, [8] * 2 * LANES))
        return [builder.and_(codes, every(0x00FF00FF, VEC_I32)), builder.bitcast(odd, VEC_I32)]

    def add(self, sums: Any, operand: Any, x: Any) -> Any:
        return _add_words(self._emit, sums, operand, x)


def integer_sums(emit: Emit, form: PanelForm) -> IntegerSums:
    """Return the sums of a form whose activations have codes, on this processor."""
    if form.code_bits == 16:
        return _Words(emit, form)
    return (_VnniBytes if has_wide_vectors() else _Bytes)(emit, form)


def _add_words(emit: Emit, sums: Any, a: Any, b: Any) -> Any:
    """Emit `sums` plus the sum of the two products in each lane of `a` and `b`, whose lanes are pairs of words."""
    found = _in_halves(emit, "llvm.x86.avx2.pmadd.wd", I16, ir.VectorType(I32, LANES // 2), a, b)
    return emit.builder.add(sums, found)


def _in_halves(emit: Emit, name: str, of: Any, result: Any, a: Any, b: Any) -> Any:
    """Emit an instruction of AVX2 on both halves of two vectors, whose numbers are of type `of`. Return both results,
    each of type `result`, as one vector of int32 lanes."""
    given, half, found = ir.VectorType(of, 256 // of.width), ir.VectorType(I32, LANES // 2), []
    for side in ([*range(LANES // 2)], [*range(LANES // 2, LANES)]):
        operands = [emit.builder.bitcast(emit.shuffle(one, one, side), given) for one in (a, b)]
        found.append(emit.builder.bitcast(emit.call(name, result, *operands), half))
    return emit.shuffle(found[0], found[1], [*range(LANES)])
