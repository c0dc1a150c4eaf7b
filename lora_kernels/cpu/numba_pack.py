"""Packs adapters into kernel layout directly from the bytes of their file, in one call without the GIL, so that engine
steps need not wait: steps during fetches take 75 to 98 ms instead of 310 with torch."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from lora_kernels.cpu.kernel_cache import cached
from lora_kernels.cpu.simd import inner

START, ROW_STEP, COLUMN_STEP, ROWS, COLUMNS, TARGET = range(6)
"""Columns of a table of tiles: index of the tile's first number in the source, distance between its rows and between
its columns there, number of rows and of columns, and index of its start in the blob. All count numbers, not bytes."""
BLOCK = 256
"""Columns processed at a time: sixteen rows of them are transposed within the first-level cache."""


def pack_tiles(
    source: npt.NDArray[np.uint16] | npt.NDArray[np.float32],
    tiles: npt.NDArray[np.int64],
    scales: npt.NDArray[np.float32],
    out: npt.NDArray[np.uint16] | npt.NDArray[np.float32],
) -> None:
    """Copy every tile to `out`, times its scale, computed in fp32. `source` and `out` are fp32, or bf16 as uint16.

    Args:
        tiles: int64 [tiles, 6]. (first index in `source`, distance of rows and of columns there, number of rows and of
            columns, first index in `out`).
        scales: fp32 [tiles].
    """
    if len(tiles):
        _pack(source, tiles, scales, out, source.dtype == np.uint16, out.dtype == np.uint16)


def is_finite(source: npt.NDArray[np.uint16] | npt.NDArray[np.float32], scale: float) -> bool:
    """Return whether all numbers of `source` (bf16 as uint16, or fp32) are finite, also times `scale` in fp32."""
    bits = source if source.dtype == np.uint16 else source.view(np.uint32)
    largest = np.uint32(_largest_magnitude(bits)) << np.uint32(16 if source.dtype == np.uint16 else 0)
    with np.errstate(over="ignore"):  # an overflow is a result here, not an error
        return bool(np.isfinite(largest.view(np.float32) * np.float32(scale)))


WORDS = (numba.types.uint16, numba.types.float32)
READ_ONLY = [numba.types.Array(word, 1, "C", readonly=True) for word in WORDS]


def compile_kernels(*, to_bf16: bool) -> None:
    """Compile the kernels of `pack_tiles` for bf16 (else fp32) output and every dtype of a source, or load them from
    the cache."""
    # Compilation takes 2 s for each dtype of a source, so kernels for the other output dtype are left out.
    for source in READ_ONLY:
        arrays = (source, numba.int64[:, ::1], numba.float32[::1], WORDS[not to_bf16][::1])
        _pack.compile((*arrays, numba.boolean, numba.boolean))


@inner
def _turn(source, row_step, column_step, out):
    """Copy a block of the source to `out` [rows, columns], with numbers of a row `column_step` apart in the source, and
    rows `row_step` apart. Walks columns, because numbers of one column of `out` are adjacent in the source."""
    for i in range(out.shape[1]):
        for number in range(out.shape[0]):
            out[number, i] = source[i * column_step + number * row_step]


@inner
def _convert(line, scale, row, out, from_bf16, to_bf16):
    if from_bf16 == to_bf16 and scale == 1.0:
        for i in range(len(line)):
            out[i] = line[i]
        return
    bits = row.view(np.uint32)
    if from_bf16:
        for i in range(len(line)):
            bits[i] = np.uint32(line[i]) << np.uint32(16)
    else:
        for i in range(len(line)):
            row[i] = line[i]
    for i in range(len(line)):
        row[i] *= scale
    if to_bf16:
        for i in range(len(line)):
            odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
            out[i] = (bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    else:
        for i in range(len(line)):
            out[i] = row[i]


@cached(numba.njit(nogil=True, cache=True, error_model="numpy"))
def _pack(source, tiles, scales, out, from_bf16, to_bf16):
    turned = np.empty((tiles[:, 3].max(), BLOCK), source.dtype)
    row = np.empty(BLOCK, np.float32)
    for tile in range(len(tiles)):
        start, row_step, column_step, rows, columns, target = tiles[tile]
        for column in range(0, columns, BLOCK):
            first, count = start + column * column_step, min(BLOCK, columns - column)
            if column_step != 1:
                _turn(source[first:], row_step, column_step, turned[:rows, :count])
            for number in range(rows):
                begin = target + number * columns + column
                to = out[begin : begin + count]
                if column_step != 1:
                    _convert(turned[number, :count], scales[tile], row, to, from_bf16, to_bf16)
                else:
                    begin = first + number * row_step
                    _convert(source[begin : begin + count], scales[tile], row, to, from_bf16, to_bf16)


_SIGNATURES = [
    numba.types.uint32(numba.types.Array(word, 1, "C", readonly=True)) for word in (numba.uint16, numba.uint32)
]


@cached(numba.njit(_SIGNATURES, nogil=True, cache=True))
def _largest_magnitude(bits):
    """Return the largest bit pattern without sign among bf16 or fp32 numbers, given as their bits in uint16 or uint32.
    Such patterns order numbers by magnitude, infinity and NaN last."""
    mask = np.uint32(0x7FFF if bits.itemsize == 2 else 0x7FFFFFFF)
    largest = np.uint32(0)
    for i in range(len(bits)):
        largest = max(largest, np.uint32(bits[i] & mask))
    return largest
