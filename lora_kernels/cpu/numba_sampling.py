"""Draws tokens on a CPU in a few passes over a row, by histograms over the bits of its scores instead of a sort.
Probabilities are integers in units of 2^-62, whose sums do not depend on the order of addition."""

from __future__ import annotations

import ctypes
import math
from functools import cache

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lora_kernels.cpu import simd
from lora_kernels.cpu.openmp import ITEM, THREAD, TICKETS, Kernel, team

ONE = 2.0**62
LEAST = 2.0**-62
"""Tokens of less probability are never drawn, and count for nothing."""
BIN_BITS, HIGHEST_SHIFT = 11, 21
BINS = 1 << BIN_BITS
"""Bins of a histogram: 11 bits of a score at a time, so that three histograms tell 32 bits apart. The counts and masses
of one take 32 kB, which stays in the second-level cache."""
BLOCK = 64
"""Number of tokens that are skipped together if none of them is likely enough."""
COUNT, MASS = 0, 1
"""Lines of a histogram: how many tokens a bin has, and their probability."""


class DrawBlock(ctypes.Structure):
    """Argument block of the draws: addresses of arrays that have an entry or a line for each row, and for each thread
    `scratch`, int64 [2, 2, BINS] followed by int32 [2, vocab] or float64 [vocab], and `scratch_bytes`, its size."""

    _fields_ = [
        *TICKETS,
        *((name, ctypes.c_int64) for name in ("rows", "vocab", "scores", "probs", "uniform", "top_k", "top_p")),
        *((name, ctypes.c_int64) for name in ("min_p", "tokens", "scratch", "scratch_bytes")),
    ]


def draw(scores: Tensor, probs: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Draw one token of each row, int64 [n], from those that min-p, top-k and top-p keep: the first, likeliest first,
    at which their cumulative probability exceeds `uniform` times their total. A row with NaN or infinity yields its
    best score.

    Args:
        scores, probs: fp32 [n, vocab], contiguous.
        uniform: float64 [n], in [0, 1).
        top_k: int64 [n], 0 for off.
        top_p, min_p: float64 [n], 1 and 0 for off.
    """
    # A row without filters takes its tokens by id, lowest first. Top-p is a share of what the other filters keep.
    rows, vocab = scores.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    scratch_bytes = 32 * BINS + 8 * vocab
    scratch = torch.empty(min(rows, torch.get_num_threads()), scratch_bytes, dtype=torch.uint8)
    arrays = scores, probs, uniform, top_k, top_p, min_p, tokens, scratch
    block = DrawBlock(0, 0, rows, vocab, *(array.data_ptr() for array in arrays), scratch_bytes)
    team().run(draw_kernel(), block, rows)
    return tokens


@cache
def draw_kernel() -> Kernel:
    """Return the kernel of `draw`, compiled on first use."""

    def draw_rows(pointer):
        block = carray(pointer, 1)[0]
        vocab = block.vocab
        scratch = block.scratch + simd.take_ticket(pointer, THREAD) * block.scratch_bytes
        bins = carray(simd.int64_at(scratch), (2, 2, BINS))
        through = carray(simd.fp64_at(scratch + 32 * BINS), vocab)
        ids = carray(simd.int32_at(scratch + 32 * BINS), (2, vocab))
        uniform, top_k = carray(simd.fp64_at(block.uniform), block.rows), carray(simd.int64_at(block.top_k), block.rows)
        top_p, min_p = carray(simd.fp64_at(block.top_p), block.rows), carray(simd.fp64_at(block.min_p), block.rows)
        tokens = carray(simd.int64_at(block.tokens), block.rows)
        row = simd.take_ticket(pointer, ITEM)
        while row < block.rows:
            scores = carray(simd.fp32_at(block.scores + 4 * vocab * row), vocab)
            bits = carray(simd.int32_at(block.scores + 4 * vocab * row), vocab)
            probs = carray(simd.fp32_at(block.probs + 4 * vocab * row), vocab)
            if top_k[row] > 0 or top_p[row] < 1 or min_p[row] > 0:
                token = _draw_filtered(bits, probs, uniform[row], top_k[row], top_p[row], min_p[row], ids, bins)
            else:
                token = _draw_any(probs, uniform[row], through)
            tokens[row] = token if token >= 0 else _best(scores)
            row = simd.take_ticket(pointer, ITEM)

    return Kernel(draw_rows, DrawBlock)


@simd.inner
def _draw_any(probs, uniform, through):
    """Draw a token of a row without filters. Return -1 if no token has any probability. `through` is working memory."""
    total = 0.0
    for token in range(len(probs)):
        total += probs[token]
        through[token] = total
    if not total > 0:
        return np.int64(-1)
    low, high = np.int64(0), np.int64(len(probs) - 1)
    while low < high:
        middle = (low + high) // 2
        if through[middle] > uniform * total:
            high = middle
        else:
            low = middle + 1
    return low


@simd.inner
def _draw_filtered(bits, probs, uniform, top_k, top_p, min_p, ids, bins):
    """Draw a token. Return -1 if no token has any probability. `ids` and `bins` are working memory."""
    limited, likely = top_k > 0 or min_p > 0, probs.view(np.int32)
    if not limited:  # tokens below this probability have less than 1 - top_p together, so that the nucleus is above it
        least = max(LEAST, (1 - top_p) / len(probs))
    else:
        least = max(LEAST, min_p * simd.fp32_of(_highest(likely))) if min_p > 0 else LEAST
        if 0 < top_k <= len(probs) // BLOCK:
            least = max(least, _reached_by(likely, top_k, bins[0]))
    count, total = _gather(bits, probs, least, ids[0], bins[0])
    if not limited and total < top_p * ONE:  # because rounded probabilities do not add up to 1
        count, total = _gather(bits, probs, LEAST, ids[0], bins[0])
    if not total:
        return np.int64(-1)
    kept = total
    if 0 < top_k < count:
        kept = _find(bits, probs, ids, count, bins, COUNT, top_k - 1)[1]
    nucleus = top_p * (kept if limited else ONE)
    if not (limited and top_p >= 1) and nucleus <= total:
        last = max(0, min(np.int64(math.ceil(nucleus)), total) - 1)
        kept = min(kept, _find(bits, probs, ids, count, bins, MASS, last)[1])
    return _find(bits, probs, ids, count, bins, MASS, min(np.int64(uniform * kept), kept - 1))[0]


@simd.inner
def _reached_by(bits, number, bins):
    """Return a probability, as high as a histogram of `bits` tells, that at least `number` tokens have. `bins` is
    working memory."""
    bins[COUNT] = 0
    for start in range(0, len(bits) - BLOCK + 1, BLOCK):
        bins[COUNT, _highest(bits[start : start + BLOCK]) >> (HIGHEST_SHIFT - 1)] += 1
    place, reached = BINS, 0
    while reached < number:
        place -= 1
        reached += bins[COUNT, place]
    return simd.fp32_of(np.int32(place << (HIGHEST_SHIFT - 1)))


@simd.inner
def _gather(bits, probs, least, ids, bins):
    """List in `ids` the tokens whose probability is at least `least`, and count them in the histogram `bins` of the
    highest bits of their scores. Return their number and their probability."""
    simd.stay_apart()
    count = 0
    for start in range(0, len(probs), BLOCK):
        stop, likely = min(start + BLOCK, len(probs)), 0
        for token in range(start, stop):
            likely += probs[token] >= least
        if likely:
            for token in range(start, stop):
                ids[count] = token  # which the next one overwrites if this one is not likely
                count += probs[token] >= least
    return count, _fill(bits, probs, ids, count, HIGHEST_SHIFT, bins)


@simd.inner
def _fill(bits, probs, ids, count, shift, bins):
    """Fill the histogram `bins` over the 11 bits from `shift` on of the scores of the first `count` tokens in `ids`.
    Return their probability."""
    bins[:] = 0
    total = 0
    for i in range(count):
        place, mass = _place(bits[ids[i]], shift), _mass(probs[ids[i]])
        bins[COUNT, place] += 1
        bins[MASS, place] += mass
        total += mass
    return total


@simd.inner
def _find(bits, probs, ids, count, bins, kind, target):
    """Return the first of the `count` tokens in ids[0], in order, through which their number (kind COUNT) or
    probability exceeds `target`, and the probability through it. bins[0] is their histogram."""
    simd.stay_apart()
    mass, source, histogram = 0, ids[0], bins[0]
    for shift in (HIGHEST_SHIFT, HIGHEST_SHIFT - BIN_BITS, 0):
        if shift < HIGHEST_SHIFT:
            _fill(bits, probs, source, count, shift, bins[1])
            histogram = bins[1]
        place = 0
        while histogram[kind, place] <= target:
            target -= histogram[kind, place]
            mass += histogram[MASS, place]
            place += 1
        left = 0
        for i in range(count):
            token = source[i]
            ids[1, left] = token
            left += _place(bits[token], shift) == place
        source, count = ids[1], left
    for i in range(count):  # these have equal scores
        token = source[i]
        mass += _mass(probs[token])
        target -= _mass(probs[token]) if kind == MASS else 1
        if target < 0:
            break
    return np.int64(token), mass


@simd.inner
def _place(bits, shift):
    """Return the bin of a score, given its bits as an integer: 11 bits, from `shift` on, of the score's place among all
    fp32 numbers from the highest down. 0.0 and -0.0 have the same place."""
    if bits == -(1 << 31):
        bits = 0
    key = np.int64(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return ((0x7FFFFFFF - key) >> shift) & (BINS - 1)


@simd.inner
def _mass(prob):
    return np.int64(prob * np.float32(ONE))


@simd.inner
def _highest(bits):
    """Return the bits of the highest probability. The bits of probabilities order like these, and LLVM compares vectors
    of integers."""
    highest = np.int32(0)
    for token in range(len(bits)):
        highest = max(highest, bits[token])
    return highest


@simd.inner
def _best(scores):
    best = 0
    for token in range(len(scores)):
        if scores[token] > scores[best] or scores[best] != scores[best]:
            best = token
    return best
