"""Traffic that nobody recorded: arrival processes, sizes, and who asks for which adapter. All seeded."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from engine.core.counts import parse_count
from engine.core.types import Lane
from engine.sim.traces import Arrival, Trace

RANKS = (4, 8, 16, 32, 64)
"""What adapters are commonly trained with; each is equally likely."""
MIN_CV, MAX_CV = 0.001, 100.0
"""Beyond, a Gamma distribution's gaps leave the floats' range."""
MAX_ARRIVALS = 10_000_000
"""Of one made-up trace: more do not fit into memory."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Inclusive bounds, drawn from uniformly.

    Raises:
        ValueError: they are not in order, or below one token.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"sizes must be LOW-HIGH with 1 <= LOW <= HIGH, not {self.low}-{self.high}")

    @classmethod
    def parse(cls, text: str) -> Sizes:
        """Read `24-96`, or `16` for always that; `1k-4k` has thousands. Raises ValueError."""
        low, _, high = text.partition("-")
        return cls(parse_count(low), parse_count(high or low))

    def draw(self, rng: Random) -> int:
        return rng.randint(self.low, self.high)


def arrivals(rate: float, seconds: float, prompt: Sizes, output: Sizes, cv: float = 1.0, seed: int = 0) -> Trace:
    """Gamma-distributed gaps with a mean of 1 / `rate` and coefficient of variation `cv`: 1 is Poisson, 4 is bursty.

    Raises:
        ValueError: nothing arrives within `seconds`, or a value is out of range.
    """
    if not 0 < rate * seconds <= MAX_ARRIVALS:
        raise ValueError(f"the rate must be positive and make at most {MAX_ARRIVALS:,} requests, not {rate:g}")
    if not MIN_CV <= cv <= MAX_CV:
        raise ValueError(f"cv must be in {MIN_CV:g} to {MAX_CV:g}, not {cv:g}")
    rng, now = Random(seed), 0.0
    trace = []
    while (now := now + gap(rate, cv, rng)) < seconds:
        trace.append(Arrival(now, prompt.draw(rng), output.draw(rng)))
    if not trace:
        raise ValueError(f"nothing arrives within {seconds:g} s at {rate:g} requests/s")
    return trace


def gap(rate: float, cv: float, rng: Random) -> float:
    """Seconds until the next arrival."""
    shape = 1 / cv**2
    return rng.gammavariate(shape, 1 / (rate * shape))


def with_adapters(trace: Trace, count: int, exponent: float, seed: int = 0) -> Trace:
    """Every request asks for one of `count` adapters, the k-th most popular with a probability of k^-exponent."""
    if not count:
        return trace
    draw = Zipf(count, exponent, Random(seed))
    return [arrival._replace(adapter=draw()) for arrival in trace]


def with_batch_share(trace: Trace, share: float, seed: int = 0) -> Trace:
    """Moves that share of the requests, picked at random, to the batch lane."""
    rng = Random(seed)
    return [arrival._replace(lane=Lane.BATCH) if rng.random() < share else arrival for arrival in trace]


def with_tenants(trace: Trace, count: int, seed: int = 0) -> Trace:
    """Spreads the requests over `count` tenants at random."""
    rng = Random(seed)
    return [arrival._replace(tenant=f"tenant-{rng.randrange(count):02}") for arrival in trace]


def adapter_ranks(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.choice(RANKS) for _ in range(count)]


class Zipf:
    """Draws indices below `count`, 0 being the most popular."""

    def __init__(self, count: int, exponent: float, rng: Random) -> None:
        self._sums = list(accumulate(rank**-exponent for rank in range(1, count + 1)))
        self._rng = rng

    def __call__(self) -> int:
        return min(bisect_left(self._sums, self._rng.random() * self._sums[-1]), len(self._sums) - 1)
