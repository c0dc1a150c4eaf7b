"""Kernels that choose each row's experts, sort the entries by expert, and cut them into tiles for LoRA.

One thread runs each of them: a step of 16 rows takes microseconds. The others wait for it, as a tape needs.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import numpy as np
from numba import carray

from lora_kernels.cpu import simd
from lora_kernels.cpu.formats import Format, read_as, size_of
from lora_kernels.cpu.openmp import ITEM, TICKETS, Kernel
from lora_kernels.cpu.products import MAX_ROWS
from lora_kernels.layout import EXPERT_TARGETS


class RouteBlock(ctypes.Structure):
    """Argument block of the choice of experts: addresses, and strides in bytes. `order` is int64 [rows], or 0 for
    ascending rows. `scratch`, fp32 [experts], and `following`, int32 [experts], are working memory; see `Routing` for
    the rest."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("rows", "experts", "top_k", "normalised", "logits", "logits_row")),
        *((name, ctypes.c_int64) for name in ("order", "entry_rows", "starts", "places", "weights")),
        *((name, ctypes.c_int64) for name in ("scratch", "following")),
    ]


class CutBlock(ctypes.Structure):
    """Argument block of the kernel that cuts entries into tiles, from the entries of `Routing`, each row's adapter slot
    (-1 for the base model) and `LoraTable.host_ranks`."""

    # `ranks` has `of_slot` numbers for each adapter slot, that of the gate of expert 0 at index `place`. The kernel
    # writes `tiles`, int32 [entries, 3]: (virtual slot, first entry, number of entries), `count`, int64 [1], and
    # `numbers`, see `EntryLora`.
    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("experts", "entries", "entry_rows", "starts", "slots", "ranks")),
        *((name, ctypes.c_int64) for name in ("of_slot", "place", "numbers", "tiles", "count")),
    ]


@cache
def route_kernel(fmt: Format) -> Kernel:
    """Return the kernel that fills in a `Routing` from logits in `fmt`, compiled on first use."""

    def route(pointer):
        block = carray(pointer, 1)[0]
        if simd.take_ticket(pointer, ITEM) == 0:
            _choose_experts(fmt, block)
            _place_entries(block)

    return Kernel(route, RouteBlock)


@cache
def cut_kernel() -> Kernel:
    """Return the kernel that cuts entries into tiles of up to MAX_ROWS neighbours with the same expert and the same
    adapter that changes it, compiled on first use."""

    def cut(pointer):
        block = carray(pointer, 1)[0]
        if simd.take_ticket(pointer, ITEM) == 0:
            _cut_tiles(block)

    return Kernel(cut, CutBlock)


@simd.inner
def _choose_experts(fmt, block):
    """Choose each row's experts. Writes the experts to `places`, where `_place_entries` replaces them, their weights to
    `weights`, and the place where each expert's entries begin to `starts`."""
    count, top_k = block.experts, block.top_k
    line, starts = carray(simd.fp32_at(block.scratch), count), carray(simd.int32_at(block.starts), count + 1)
    starts[:] = 0
    for row in range(block.rows):
        for expert in range(count):
            line[expert] = read_as(fmt, block.logits + row * block.logits_row + expert * size_of(fmt))
        chosen = carray(simd.int32_at(block.places + 4 * row * top_k), top_k)
        values = carray(simd.fp32_at(block.weights + 4 * row * top_k), top_k)
        _choose(line, chosen, values)
        largest, total = values[0], np.float32(0)
        if block.normalised:
            for k in range(top_k):
                total += math.exp(values[k] - largest)
        else:
            for expert in range(count):
                total += math.exp(line[expert] - largest)
        for k in range(top_k):
            values[k] = math.exp(values[k] - largest) / total
            starts[chosen[k] + 1] += 1
    for expert in range(count):
        starts[expert + 1] += starts[expert]


@simd.inner
def _choose(line, chosen, values):
    """Find the len(chosen) largest numbers of `line`. Writes their indices to `chosen` and the numbers to `values`, the
    largest first."""
    top_k, filled = len(chosen), 0
    for expert in range(len(line)):
        value = line[expert]
        if filled == top_k and not value > values[top_k - 1]:
            continue
        k = min(filled, top_k - 1)
        filled = min(filled + 1, top_k)
        while k > 0 and values[k - 1] < value:
            values[k], chosen[k] = values[k - 1], chosen[k - 1]
            k -= 1
        values[k], chosen[k] = value, expert


@simd.inner
def _place_entries(block):
    """Sort entries by expert: write each entry's row to `entry_rows`, and replace experts by entries in `places`."""
    following = carray(simd.int32_at(block.following), block.experts)
    for expert in range(block.experts):
        following[expert] = simd.read_i32(block.starts + 4 * expert)
    rows = carray(simd.int32_at(block.entry_rows), block.rows * block.top_k)
    places = carray(simd.int32_at(block.places), block.rows * block.top_k)
    for number in range(block.rows):
        row = simd.read_i64(block.order + 8 * number) if block.order else number
        for k in range(row * block.top_k, (row + 1) * block.top_k):
            expert = places[k]
            place = following[expert]
            rows[place] = row
            places[k] = place
            following[expert] += 1


@simd.inner
def _cut_tiles(block):
    rows, slots = carray(simd.int32_at(block.entry_rows), block.entries), carray(simd.int32_at(block.slots), 1 << 31)
    numbers, tiles = (
        carray(simd.int32_at(block.numbers), block.entries),
        carray(simd.int32_at(block.tiles), (block.entries, 3)),
    )
    count = 0
    for expert in range(block.experts):
        last = -1
        start, stop = simd.read_i32(block.starts + 4 * expert), simd.read_i32(block.starts + 4 * expert + 4)
        for entry in range(start, stop):
            numbers[entry] = entry
            slot = slots[rows[entry]]
            if slot >= 0 and slot == last and tiles[count - 1, 2] < MAX_ROWS:
                tiles[count - 1, 2] += 1
                continue
            last, first = -1, slot * block.of_slot + block.place + EXPERT_TARGETS * expert
            if slot >= 0 and _has_rank(block.ranks + 4 * first):
                tiles[count, 0], tiles[count, 1], tiles[count, 2] = first // EXPERT_TARGETS, entry, 1
                last = slot
                count += 1
    carray(simd.int64_at(block.count), 1)[0] = count


@simd.inner
def _has_rank(ranks):
    """Return whether the adapter whose ranks of an expert are at address `ranks` changes the expert."""
    return simd.read_i32(ranks) + simd.read_i32(ranks + 4) + simd.read_i32(ranks + 8) > 0
