"""The two products of the CPU kernels, each for up to four rows: `dot_rows` (attention's scores, LoRA's shrink) and
`mix_rows` (weighted values, LoRA's expand). A row's result does not depend on the other rows."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lora_kernels.cpu.formats import emit_load
from lora_kernels.cpu.simd import F32, I64, LANES, VEC, Emit, every, has_wide_vectors, inner, stay_apart

MAX_ROWS = 4
"""Rows of one product. Four rows of four vectors are sixteen sums, which leaves AVX-512 registers for the operands.
With AVX2, where a vector takes two of sixteen registers, four sums are kept at a time: sixteen halved the speed."""
LINE = 64
"""Bytes of a cache line."""
AHEAD = 8 * LINE
"""Bytes that `mix` prefetches ahead along a row of weights, whose runs are too short for the hardware prefetcher. Of 30
GB/s that the machine reads, LoRA reaches 12 without prefetches, 20 with this and the prefetches of `dots`, and 23 with
`ahead` as well."""


def _tiles(rows: int) -> list[tuple[range, range]]:
    """Return the tiles, each as its rows and columns, that together cover `rows` rows and four columns. The sums of a
    tile stay in registers."""
    if has_wide_vectors() or rows == 1:
        return [(range(rows), range(4))]
    return [(range(r, min(r + 2, rows)), range(c, c + 2)) for r in range(0, rows, 2) for c in (0, 2)]


def _vectors(rows: int) -> int:
    """Return how many vectors of `rows` rows stay in registers as sums, beside the operands."""
    return 4 if has_wide_vectors() else MAX_ROWS // rows


def _make_dots(rows: int) -> Any:
    def codegen(context, builder, signature, args):
        _, x, x_bytes, w, w_bytes, count, width, out, out_bytes, ahead = args
        fmt = signature.args[0].of
        emit = Emit(builder)
        last, line = builder.sub(count, ir.Constant(I64, 1)), LINE // fmt.size
        full, lines = (builder.and_(width, ir.Constant(I64, -step)) for step in (LANES, line))
        sums = [[cgutils.alloca_once(builder, VEC) for _ in range(4)] for _ in range(rows)]
        is_ahead = builder.icmp_signed("!=", ahead, ir.Constant(I64, 0))
        with emit.loop(ir.Constant(I64, 0), count, 4) as n:
            numbers = [builder.add(n, ir.Constant(I64, i)) for i in range(4)]
            kept = [builder.select(builder.icmp_signed("<", i, last), i, last) for i in numbers]
            columns = [emit.offset(w, (i, w_bytes)) for i in kept]
            for row in sums:
                for place in row:
                    builder.store(every(0.0, VEC), place)

            def accumulate(tile: tuple[range, range], k: Any, mask: Any = None) -> None:
                weights = [emit_load(emit, fmt, emit.offset(columns[c], (k, fmt.size)), mask) for c in tile[1]]
                for r in tile[0]:
                    value = emit.raw(emit.offset(x, (r, x_bytes), (k, 4)), VEC, None)
                    for c, weight in zip(tile[1], weights, strict=True):
                        builder.store(emit.fma(value, weight, builder.load(sums[r][c])), sums[r][c])

            for number, tile in enumerate(_tiles(rows)):
                with emit.loop(ir.Constant(I64, 0), lines, line) as k:
                    if not number:
                        for column in columns:
                            emit.prefetch(emit.offset(column, (k, fmt.size), (w_bytes, 4)))
                        with builder.if_then(is_ahead):
                            for column in columns:
                                emit.prefetch(emit.offset(column, (k, fmt.size), (ahead, 1)))
                    for lane in range(0, line, LANES):
                        accumulate(tile, builder.add(k, ir.Constant(I64, lane)))
                with emit.loop(lines, full, LANES) as k:
                    accumulate(tile, k)
                with builder.if_then(builder.icmp_signed("<", full, width)):
                    accumulate(tile, full, emit.lanes_below(builder.sub(width, full)))
            for r, row in enumerate(sums):
                four = emit.totals([builder.load(place) for place in row])
                builder.store(four, emit.at(emit.offset(out, (r, out_bytes), (n, 4)), four.type), align=4)

    @intrinsic
    def dots(typingctx, fmt, x, x_bytes, w, w_bytes, count, width, out, out_bytes, ahead):
        return types.void(fmt, *[types.int64] * 9), codegen

    return dots


def _make_mix(rows: int) -> Any:
    def codegen(context, builder, signature, args):
        _, p, p_bytes, w, w_bytes, count, width, out, out_bytes, ahead = args
        fmt = signature.args[0].of
        emit = Emit(builder)
        is_ahead = builder.icmp_signed("!=", ahead, ir.Constant(I64, 0))

        def columns(start: Any, vectors: int, mask: Any) -> None:
            sums = [[cgutils.alloca_once(builder, VEC) for _ in range(vectors)] for _ in range(rows)]
            places = [
                [emit.offset(out, (r, out_bytes), (start, 4), (LANES * v, 4)) for v in range(vectors)]
                for r in range(rows)
            ]
            for row, addresses in zip(sums, places, strict=True):
                for place, address in zip(row, addresses, strict=True):
                    builder.store(emit.raw(address, VEC, None), place)
            with emit.loop(ir.Constant(I64, 0), count, 1) as n:
                source = emit.offset(w, (n, w_bytes), (start, fmt.size))
                weights = [
                    emit_load(emit, fmt, emit.offset(source, (LANES * v, fmt.size)), mask) for v in range(vectors)
                ]
                lines = range(0, LANES * vectors * fmt.size, LINE)
                for byte in lines:
                    emit.prefetch(emit.offset(source, (AHEAD + byte, 1)))
                with builder.if_then(is_ahead):
                    for byte in lines:
                        emit.prefetch(emit.offset(source, (ahead, 1), (byte, 1)))
                for r, row in enumerate(sums):
                    factor = emit.splat(builder.load(emit.at(emit.offset(p, (r, p_bytes), (n, 4)), F32), align=4))
                    for place, weight in zip(row, weights, strict=True):
                        builder.store(emit.fma(factor, weight, builder.load(place)), place)
            for row, addresses in zip(sums, places, strict=True):
                for place, address in zip(row, addresses, strict=True):
                    builder.store(builder.load(place), emit.at(address, VEC), align=4)

        vectors = _vectors(rows)
        wide = builder.and_(width, ir.Constant(I64, -vectors * LANES))
        full = builder.and_(width, ir.Constant(I64, -LANES))
        with emit.loop(ir.Constant(I64, 0), wide, vectors * LANES) as start:
            columns(start, vectors, None)
        with emit.loop(wide, full, LANES) as start:
            columns(start, 1, None)
        with builder.if_then(builder.icmp_signed("<", full, width)):
            columns(full, 1, emit.lanes_below(builder.sub(width, full)))

    @intrinsic
    def mix(typingctx, fmt, p, p_bytes, w, w_bytes, count, width, out, out_bytes, ahead):
        return types.void(fmt, *[types.int64] * 9), codegen

    return mix


_dots_1, _dots_2, _dots_3, _dots_4 = (_make_dots(rows) for rows in (1, 2, 3, 4))
_mix_1, _mix_2, _mix_3, _mix_4 = (_make_mix(rows) for rows in (1, 2, 3, 4))


@inner
def dot_rows(fmt, rows, x, x_bytes, w, w_bytes, count, width, out, out_bytes, ahead):
    """Compute out[r, n] = x[r] . w[n], for r < rows (at most 4) and n < count. Arrays are byte addresses, and
    `..._bytes` distances between rows."""
    # x is fp32 [rows, width], padded with zeros to a multiple of 16; w is [count, width] in `fmt`; out is fp32 [rows,
    # count rounded up to 4]. `ahead` is the distance in bytes from w to the weights to prefetch, or 0.
    stay_apart()
    if rows == 1:
        _dots_1(fmt, x, x_bytes, w, w_bytes, count, width, out, out_bytes, ahead)
    elif rows == 2:
        _dots_2(fmt, x, x_bytes, w, w_bytes, count, width, out, out_bytes, ahead)
    elif rows == 3:
        _dots_3(fmt, x, x_bytes, w, w_bytes, count, width, out, out_bytes, ahead)
    else:
        _dots_4(fmt, x, x_bytes, w, w_bytes, count, width, out, out_bytes, ahead)


@inner
def mix_rows(fmt, rows, p, p_bytes, w, w_bytes, count, width, out, out_bytes, ahead):
    """Add to out[r] the sum over n < count of p[r, n] * w[n], for r < rows (at most 4). Arrays are byte addresses, and
    `..._bytes` distances between rows."""
    # p is fp32 [rows, count]; w is [count, width] in `fmt`; out is fp32 [rows, width rounded up to 16]. `ahead` is as
    # in `dot_rows`.
    stay_apart()
    if rows == 1:
        _mix_1(fmt, p, p_bytes, w, w_bytes, count, width, out, out_bytes, ahead)
    elif rows == 2:
        _mix_2(fmt, p, p_bytes, w, w_bytes, count, width, out, out_bytes, ahead)
    elif rows == 3:
        _mix_3(fmt, p, p_bytes, w, w_bytes, count, width, out, out_bytes, ahead)
    else:
        _mix_4(fmt, p, p_bytes, w, w_bytes, count, width, out, out_bytes, ahead)
