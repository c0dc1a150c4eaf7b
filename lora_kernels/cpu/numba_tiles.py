"""Products of up to six rows with a *panel*: sixteen outputs of a weight, whose numbers are one run of memory. Panels
of an fp32 weight whose numbers are all bf16's are in bf16, with results equal to the bit."""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import emit_load, emit_load_number, emit_store
from lora_kernels.cpu.simd import I64, LANES, VEC, Emit, every

TILE_ROWS = 6
COMPARED = 1 << 24
"""Numbers of a weight that `panel_dtype` compares with their bf16 copies at a time. With fewer, torch's threads would
wait for each other more often, each time for up to 20 ms on cores that other processes use."""


def panel_dtype(weight: Tensor) -> torch.dtype:
    """Return the smallest dtype that holds every number of a weight exactly: its own, or bf16 in place of fp32. The
    weight is compared in pieces, because copies of a whole head would take 1.5 times its memory."""
    if weight.dtype != torch.float32:
        return weight.dtype
    pieces = weight.split(max(1, COMPARED // weight.shape[1]))
    return torch.bfloat16 if all(torch.equal(rows.bfloat16().float(), rows) for rows in pieces) else weight.dtype


def pack_panels(weight: Tensor, packed: Tensor) -> None:
    """Copy a weight [out_features, in_features] into `packed` [panels, in_features, 16], of its `panel_dtype` or a
    wider one. Outputs beyond the weight's must be 0 and stay 0."""
    features, width = weight.shape
    whole = features // LANES
    packed[:whole] = weight[: whole * LANES].view(whole, LANES, width).transpose(1, 2)
    if rest := features % LANES:
        packed[whole, :, :rest] = weight[whole * LANES :].T


@simd.inner
def multiply_panel(fmt, w_fmt, out_fmt, rows, x, x_row, w, width, bias, out, out_row, count, ahead):
    """Multiply any number of rows by a panel [width, 16] at `w`, add a bias, and store the first min(`count`, 16)
    columns.

    Args:
        fmt, w_fmt, out_fmt: formats of `x`, the panel and `out`.
        x_row, out_row: distances of rows in bytes.
        bias: address of sixteen fp32 numbers, or 0.
        ahead: address of a panel to prefetch, or `w`.
    """
    tiles, start = (rows + TILE_ROWS - 1) // TILE_ROWS, 0
    for tile in range(tiles):
        stop = rows * (tile + 1) // tiles
        here, to = x + start * x_row, out + start * out_row
        following = w if tile else ahead
        _tile(fmt, w_fmt, out_fmt, stop - start, here, x_row, w, width, bias, to, out_row, count, following)
        start = stop


def _make_tile(rows: int) -> Any:
    """Make an intrinsic that does what `multiply_panel` does, of `rows` rows whose sums fit into registers."""

    def codegen(context, builder, signature, args):
        fmt, w_fmt, out_fmt = (argument.of for argument in signature.args[:3])
        _, _, _, x, x_row, w, width, bias, out, out_row, count, ahead = args
        emit = Emit(builder)
        sums = [cgutils.alloca_once(builder, VEC) for _ in range(rows)]
        for place in sums:
            builder.store(every(0.0, VEC), place)
        with builder.if_then(builder.icmp_signed("!=", bias, ir.Constant(I64, 0))):
            first = emit.raw(bias, VEC, None)
            for place in sums:
                builder.store(first, place)
        with emit.loop(ir.Constant(I64, 0), width, 1) as k:
            weight = emit_load(emit, w_fmt, emit.offset(w, (k, w_fmt.size * LANES)))
            emit.prefetch(emit.offset(ahead, (k, w_fmt.size * LANES)))
            for r, place in enumerate(sums):
                value = emit.splat(emit_load_number(emit, fmt, emit.offset(x, (r, x_row), (k, fmt.size))))
                builder.store(emit.fma(value, weight, builder.load(place)), place)
        for r, place in enumerate(sums):
            emit_store(emit, out_fmt, emit.offset(out, (r, out_row)), builder.load(place), count)

    @intrinsic
    def tile(typingctx, fmt, w_fmt, out_fmt, x, x_row, w, width, bias, out, out_row, count, ahead):
        return types.void(fmt, w_fmt, out_fmt, *[types.int64] * 9), codegen

    return tile


_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = (_make_tile(rows) for rows in range(1, TILE_ROWS + 1))


@simd.inner
def _tile(fmt, w_fmt, out_fmt, rows, x, x_row, w, width, bias, out, out_row, count, ahead):
    simd.stay_apart()
    if rows == 6:
        _tile_6(fmt, w_fmt, out_fmt, x, x_row, w, width, bias, out, out_row, count, ahead)
    elif rows == 5:
        _tile_5(fmt, w_fmt, out_fmt, x, x_row, w, width, bias, out, out_row, count, ahead)
    elif rows == 4:
        _tile_4(fmt, w_fmt, out_fmt, x, x_row, w, width, bias, out, out_row, count, ahead)
    elif rows == 3:
        _tile_3(fmt, w_fmt, out_fmt, x, x_row, w, width, bias, out, out_row, count, ahead)
    elif rows == 2:
        _tile_2(fmt, w_fmt, out_fmt, x, x_row, w, width, bias, out, out_row, count, ahead)
    else:
        _tile_1(fmt, w_fmt, out_fmt, x, x_row, w, width, bias, out, out_row, count, ahead)
