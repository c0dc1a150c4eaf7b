"""Kernels that route rows to experts without the host. Entries are sorted by counting, without atomics, so that results
are the same each time. All sizes depend on the numbers of rows and experts alone, as CUDA graphs require."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-(2**63))
"""An int64 below the key of any logit."""


@triton.jit(do_not_specialize=["rows"])
def choose_experts_kernel(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    rows,
    logits_stride,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Find the TOP_K largest logits of ROWS rows: write their experts, int32, and weights, fp32, [rows, TOP_K]."""
    # A logit is compared by an integer, its upper half in the order of floats and its lower half preferring the first
    # of equals. Therefore a row of NaN has TOP_K experts, too, and harms no other.
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, BLOCK)
    k = tl.arange(0, CHOSEN)
    valid = (m < rows)[:, None] & (e < EXPERTS)[None, :]
    places = logits_ptr + m.to(tl.int64)[:, None] * logits_stride + e[None, :]
    logits = tl.load(places, mask=valid, other=-float("inf")).to(tl.float32)
    bits = logits.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = tl.where((e < EXPERTS)[None, :], (ordered << 32) + (BLOCK - 1 - e)[None, :], LEAST)
    chosen = tl.zeros((ROWS, CHOSEN), dtype=tl.int64)
    for number in tl.static_range(TOP_K):
        best = tl.max(keys, axis=1)
        chosen = tl.where((k == number)[None, :], best[:, None], chosen)
        keys = tl.where(keys == best[:, None], LEAST, keys)
    ordered = (chosen >> 32).to(tl.int32)
    values = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
    largest = tl.sum(tl.where((k == 0)[None, :], values, 0.0), axis=1)
    exponentials = tl.exp(values - largest[:, None])
    if NORMALISED:
        total = tl.sum(tl.where((k < TOP_K)[None, :], exponentials, 0.0), axis=1)
    else:
        total = tl.sum(tl.where((e < EXPERTS)[None, :], tl.exp(logits - largest[:, None]), 0.0), axis=1)
    place = m[:, None] * TOP_K + k[None, :]
    mask = (m < rows)[:, None] & (k < TOP_K)[None, :]
    tl.store(experts_ptr + place, BLOCK - 1 - (chosen & 0x7FFFFFFF).to(tl.int32), mask=mask)
    tl.store(weights_ptr + place, exponentials / total[:, None], mask=mask)


@triton.jit(do_not_specialize=["entries"])
def place_entries_kernel(
    experts_ptr,
    order_ptr,
    rows_ptr,
    places_ptr,
    starts_ptr,
    entries,
    TOP_K: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the fields of `Routing` of one expert: count the entries of the experts before it, then number its own, row
    by row in the given order."""
    # Each program reads the experts of all entries, which takes less time than programs that wait for each other.
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    earlier = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, entries, BLOCK):
        earlier += tl.load(experts_ptr + first + i, mask=first + i < entries, other=expert) < expert
    place = tl.sum(earlier, axis=0)
    tl.store(starts_ptr + expert, place)
    tl.store(starts_ptr + expert + 1, entries, mask=expert == tl.num_programs(0) - 1)
    for first in range(0, entries, BLOCK):
        row = (first + i) // TOP_K
        if HAS_ORDER:
            row = tl.load(order_ptr + row, mask=first + i < entries, other=0).to(tl.int32)
        entry = row * TOP_K + (first + i) % TOP_K
        mine = tl.load(experts_ptr + entry, mask=first + i < entries, other=-1) == expert
        number = place + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(rows_ptr + number, row, mask=mine)
        tl.store(places_ptr + entry, number, mask=mine)
        place += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def combine_kernel(
    entries_ptr,
    places_ptr,
    weights_ptr,
    out_ptr,
    width,
    entries_stride,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute out[row, columns], the sum of the row's entries times their weights, always in the same order."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        place = tl.load(places_ptr + row * TOP_K + k).to(tl.int64)
        part = tl.load(entries_ptr + place * entries_stride + n, mask=n < width, other=0.0)
        weight = tl.load(weights_ptr + row * TOP_K + k).to(part.dtype).to(tl.float32)
        total += part.to(tl.float32) * weight
    at = out_ptr + row.to(tl.int64) * width + n
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=n < width)
