"""Searches a row of scores without sorting it: how far down the order (score, descending; id, ascending) until a number
of tokens or a probability is exceeded. Probabilities are integers in units of 2^-43, whose sums have no order."""

from __future__ import annotations

import triton
import triton.language as tl

# A histogram answers to a sixteenth of a logit; passes over the few tokens above it then measure three candidates each,
# until the interval holds one score. Its bins count tokens in low bits and probability in those above. Rows have `n`
# scores, followed by -inf up to the end of a tile.

COUNT_BITS = tl.constexpr(19)
COUNT_MASK = tl.constexpr((1 << COUNT_BITS.value) - 1)
ONE = tl.constexpr(1 << 43)
"""The integer that stands for a probability of 1."""
LOWEST = tl.constexpr(-2139095041)
"""The key (see `order_key`) of -inf."""
BINS = tl.constexpr(256)
BINS_A_LOGIT = tl.constexpr(16)


@triton.jit
def order_key(scores):
    """Return int32 keys in the order of the fp32 `scores`, which must not hold NaN. 0.0 and -0.0 have the same key."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_score(key):
    """Return the score of a key: the inverse of `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(scores, peak, scale):
    """Return each score's probability in units of 2^-43: exp(scores - peak) * scale, truncated to int64."""
    return (tl.exp(scores - peak) * scale).to(tl.int64)


@triton.jit
def share(part, mass):
    """Return the fraction `part`, in units of 2^-62, of a probability: part * 2^-62 * mass, truncated to int64. `part`
    is at most 2^62, and `mass` at most 2^61."""
    return tl.umulhi(part.to(tl.uint64), mass.to(tl.uint64) << 2).to(tl.int64)


@triton.jit
def mix(state):
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def point_in(mass, seed, position):
    """Return an int64 in [0, mass): `mass` times the uniform random number in [0, 1) that the engine's draws take for
    (seed, position)."""
    step = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    state = mix(mix(seed.to(tl.uint64) + step) + (position.to(tl.uint64) + 1) * step)
    return tl.umulhi((state >> 12) << 12, mass.to(tl.uint64)).to(tl.int64)


@triton.jit
def field(measured, WEIGH: tl.constexpr):
    """Return the probability (with WEIGH) or else the number of tokens of histogram entries `measured`."""
    if WEIGH:
        return measured >> COUNT_BITS
    return measured & COUNT_MASK


@triton.jit
def bin_of(scores, peak):
    """Return the histogram bin of each score, int32: 0 at `peak`, one more per 1/16 below, at most BINS (no bin)."""
    return tl.minimum((peak - scores) * BINS_A_LOGIT, BINS).to(tl.int32)


@triton.jit
def fill_histogram(bins_ptr, row_ptr, n, peak, scale, TILE: tl.constexpr):
    """Fill the histogram at `bins_ptr` from the scores `row_ptr[:n]`. Return its cumulative sums, int64 [BINS]: for
    each bin the sum of the entries up to and including that bin, see `field`."""
    bins = tl.arange(0, BINS)
    tl.store(bins_ptr + bins, tl.zeros((BINS,), dtype=tl.int64))
    tl.debug_barrier()
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        scores = tl.load(row_ptr + i)
        place = bin_of(scores, peak)
        measured = (weigh(scores, peak, scale) << COUNT_BITS) | 1
        tl.atomic_add(bins_ptr + place, measured, mask=place < BINS, sem="relaxed")
    tl.debug_barrier()
    return tl.cumsum(tl.load(bins_ptr + bins), 0)


@triton.jit
def gather(to_ptr, row_ptr, n, last_bin, least, peak, scale, TILE: tl.constexpr):
    """Copy to `to_ptr`, in token order, the scores of `row_ptr[:n]` in bins up to `last_bin` whose probability (see
    `weigh`) is at least `least`. Return their number and total probability. Pads the last tile with -inf."""
    gathered = n * 0
    mass = tl.zeros((TILE,), dtype=tl.int64)
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        scores = tl.load(row_ptr + i)
        near = bin_of(scores, peak) <= last_bin
        if tl.max(near.to(tl.int32), 0) > 0:
            weights = weigh(scores, peak, scale)
            wanted = (near & (weights >= least)).to(tl.int32)
            mass += tl.where(wanted > 0, weights, 0)
            tl.store(to_ptr + gathered + tl.cumsum(wanted, 0) - wanted, scores, mask=wanted > 0)
            gathered += tl.sum(wanted, 0)
    tail = gathered + tl.arange(0, TILE)
    tl.store(to_ptr + tail, float("-inf"), mask=tail < tl.cdiv(gathered, TILE) * TILE)
    tl.debug_barrier()
    return gathered, tl.sum(mass, 0)


@triton.jit
def search(ptr, n, low, high, target, peak, scale, WEIGH: tl.constexpr, TILE: tl.constexpr):
    """Return the highest key (int64) such that scores of `ptr[:n]` with at least that key amount to more than `target`,
    in probability with WEIGH, else in number. The result must lie in `low` to before `high`."""
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
            scores = tl.load(ptr + i)
            key = order_key(scores)
            amount = tl.full((TILE,), 1, tl.int64)
            if WEIGH:
                amount = weigh(scores, peak, scale)
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
    """Return how many scores of `ptr[:n]` have keys of at least `low`, and their total probability, both int64."""
    count = tl.zeros((TILE,), dtype=tl.int64)
    mass = tl.zeros((TILE,), dtype=tl.int64)
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        scores = tl.load(ptr + i)
        above = order_key(scores) >= low
        count += above.to(tl.int64)
        mass += tl.where(above, weigh(scores, peak, scale), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def find(ptr, n, key, index, TILE: tl.constexpr):
    """Return the index (int64) in `ptr[:n]` of the `index`-th (from 0) score with this key, or of the last such score
    if there are fewer; 0 if there is none."""
    place = (n * 0).to(tl.int64)
    seen = place
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        scores = tl.load(ptr + i)
        equal = (order_key(scores) == key).to(tl.int32)
        number = tl.sum(equal, 0)
        if (number > 0) & (seen <= index):
            before = seen + tl.cumsum(equal, 0) - equal
            place = tl.maximum(place, tl.max(tl.where((equal > 0) & (before <= index), i, 0), 0))
        seen += number
    return place
