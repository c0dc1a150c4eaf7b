"""Searching a row of scores without sorting it: the pieces of the sampling kernels.

Tokens are ordered by (score, descending; id, ascending). Every filter keeps a prefix of that order and a draw is a place
in it, so all of them are one search: for the lowest score from which on there is more than so much (so many tokens, or
so much probability). A pass over the row measures three candidates at once, which halves the interval twice.

Probabilities are integers of 2^-60: their sums do not depend on the order in which they are added, which makes a row's
outcome the same in every batch, for every tile size and on every device that computes the same exponentials.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE = tl.constexpr(1 << 60)
"""A probability of 1."""
LOWEST = tl.constexpr(-2139095041)
"""The key of -inf."""


@triton.jit
def order_key(scores):
    """int32 that order like fp32 `scores`, which hold no NaN. 0.0 and -0.0 are one."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_score(key):
    """The inverse of `order_key`, for one key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(scores, peak, scale):
    """int64: exp(scores - peak) scale, cut off."""
    return (tl.exp(scores - peak) * scale).to(tl.int64)


@triton.jit
def share(part, mass):
    """int64: part 2^-62 of mass, rounded up. `part` is at most 2^62, `mass` at most 2^61."""
    part = part.to(tl.uint64)
    whole = mass.to(tl.uint64) << 2
    return tl.umulhi(part, whole).to(tl.int64) + ((part * whole) != 0).to(tl.int64)


@triton.jit
def mix(state):
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def point_in(mass, seed, position):
    """int64 in [0, mass): the uniform number of (seed, position), as in the engine's draws, times `mass`."""
    step = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    state = mix(mix(seed.to(tl.uint64) + step) + (position.to(tl.uint64) + 1) * step)
    return tl.umulhi((state >> 12) << 12, mass.to(tl.uint64)).to(tl.int64)


@triton.jit
def measure(scores, peak, scale, WEIGH: tl.constexpr):
    """What a token counts for in a search: its probability, or 1."""
    if WEIGH:
        return weigh(scores, peak, scale)
    return (scores == scores).to(tl.int64)


@triton.jit
def search(ptr, n, low, high, target, peak, scale, WEIGH: tl.constexpr, TILE: tl.constexpr):
    """The highest key from which on `ptr[:n]` measures more than `target`.

    Keys are int64 here. More than `target` lies from `low` on, and not more from `high` on.
    """
    while high - low > 1:
        step = (high - low + 3) // 4
        first = low + step
        second = first + step
        third = second + step
        from_first = tl.zeros((TILE,), dtype=tl.int64)
        from_second = tl.zeros((TILE,), dtype=tl.int64)
        from_third = tl.zeros((TILE,), dtype=tl.int64)
        for start in range(0, n, TILE):
            i = start + tl.arange(0, TILE)
            scores = tl.load(ptr + i, mask=i < n, other=float("-inf"))
            key = order_key(scores)
            amount = tl.where(i < n, measure(scores, peak, scale, WEIGH), 0)
            from_first += tl.where(key >= first.to(tl.int32), amount, 0)
            from_second += tl.where(key >= second.to(tl.int32), amount, 0)
            from_third += tl.where(key >= third.to(tl.int32), amount, 0)
        more_first = tl.sum(from_first, 0) > target
        more_second = tl.sum(from_second, 0) > target
        more_third = tl.sum(from_third, 0) > target
        high = tl.minimum(high, tl.where(more_third, high, tl.where(more_second, third, second)))
        high = tl.where(more_first, high, first)
        low = tl.where(more_third, third, tl.where(more_second, second, tl.where(more_first, first, low)))
    return low


@triton.jit
def tally(ptr, n, low, peak, scale, TILE: tl.constexpr):
    """How many of `ptr[:n]` have keys of at least `low`, and their probability: int64 both."""
    count = tl.zeros((TILE,), dtype=tl.int64)
    mass = tl.zeros((TILE,), dtype=tl.int64)
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        scores = tl.load(ptr + i, mask=i < n, other=float("-inf"))
        above = (order_key(scores) >= low) & (i < n)
        count += above.to(tl.int64)
        mass += tl.where(above, weigh(scores, peak, scale), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def likely_mass(ptr, n, least, peak, scale, TILE: tl.constexpr):
    """int64: the probability of tokens that have at least `least` each."""
    mass = tl.zeros((TILE,), dtype=tl.int64)
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        weights = weigh(tl.load(ptr + i, mask=i < n, other=float("-inf")), peak, scale)
        mass += tl.where(weights >= least, weights, 0)
    return tl.sum(mass, 0)


@triton.jit
def find(ptr, n, key, index, TILE: tl.constexpr):
    """int64: the place of the `index`-th (from 0) of `ptr[:n]` with this key, or of the last of them."""
    place = (n * 0).to(tl.int64)
    seen = place
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        scores = tl.load(ptr + i, mask=i < n, other=float("-inf"))
        equal = ((order_key(scores) == key) & (i < n)).to(tl.int32)
        before = seen + tl.cumsum(equal, 0) - equal
        place = tl.maximum(place, tl.max(tl.where((equal > 0) & (before <= index), i, 0), 0))
        seen += tl.sum(equal, 0)
    return place
