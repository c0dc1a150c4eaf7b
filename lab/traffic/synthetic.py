"""Generates synthetic traffic from a seed: random arrivals, sizes, tenants, lanes and adapters."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from math import pi, sin
from random import Random

from engine.core.messages.requests import Lane
from gateway.core.counts import parse_count
from lab.traffic.traces import Arrival, Trace

RANKS = (4, 8, 16, 32, 64)
"""Common ranks of adapters; each is equally likely."""
MIN_CV, MAX_CV = 0.001, 100.0
"""Limits of the coefficient of variation. Beyond them, Gamma-distributed gaps leave the range of floats."""
MAX_ARRIVALS = 10_000_000
"""Maximum length of a synthetic trace in requests; more do not fit into memory."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A uniform distribution of prompt or answer lengths in tokens, with inclusive bounds. Raises ValueError if they
    are not in order, or below 1."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"sizes must be LOW-HIGH with 1 <= LOW <= HIGH, not {self.low}-{self.high}")

    @classmethod
    def parse(cls, text: str) -> Sizes:
        """Parse a range such as `24-96` or `1k-4k` (thousands), or a fixed size such as `16`. Raises ValueError if the
        text is neither, or if a size is out of range."""
        low, _, high = text.partition("-")
        return cls(parse_count(low), parse_count(high or low))

    def draw(self, rng: Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Shares:
    """A uniform distribution of fractions from which a simulation draws, such as the share of an answer's tokens that
    its prediction has right. Raises ValueError if its bounds are not in order, or not in 0 to 1."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"shares must be LOW-HIGH with 0 <= LOW <= HIGH <= 1, not {self.low:g}-{self.high:g}")

    @classmethod
    def parse(cls, text: str) -> Shares:
        """Parse a range such as `0.2-0.9`, or a fixed share such as `0.7`. Raises ValueError if the text is neither, or
        if a share is out of range."""
        low, _, high = text.partition("-")
        return cls(float(low), float(high or low))

    def draw(self, rng: Random) -> float:
        return rng.uniform(self.low, self.high)


def arrivals(rate: float, seconds: float, prompt: Sizes, output: Sizes, cv: float = 1.0, seed: int = 0) -> Trace:
    """Return a random trace of `seconds` seconds with Gamma gaps of mean 1 / `rate` and coefficient of variation `cv`
    (1: Poisson, 4: bursty), and sizes from `prompt` and `output`. Raises ValueError if none arrive or values are
    bad."""
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
    """Draw the seconds until the next arrival from a Gamma distribution with mean 1 / `rate` and coefficient of
    variation `cv`."""
    shape = 1 / cv**2
    return rng.gammavariate(shape, 1 / (rate * shape))


def with_adapters(trace: Trace, count: int, exponent: float, seed: int = 0) -> Trace:
    """Return the trace with one of `count` adapters assigned to each request at random, the k-th most popular with a
    probability proportional to k^-exponent. A `count` of 0 returns the trace unchanged."""
    if not count:
        return trace
    draw = Zipf(count, exponent, Random(seed))
    return [arrival._replace(adapter=draw()) for arrival in trace]


@dataclass(frozen=True, slots=True)
class FlashCrowd:
    """A flash crowd in synthetic traffic: one adapter gets `share` of all requests from `start` to `end`, in seconds.
    Raises ValueError if a value is out of range."""

    share: float
    start: float
    end: float
    """Beginning and end in seconds from the beginning of the trace."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or not 0 <= self.start < self.end:
            raise ValueError(f"a flash crowd has a share of 0 to 1 and begins before it ends, not {self}")

    @classmethod
    def parse(cls, text: str) -> FlashCrowd:
        """Parse `SHARE@START-END`, such as `0.4@60-120`. Raises ValueError for other text and values out of range."""
        share, _, when = text.partition("@")
        start, _, end = when.partition("-")
        try:
            return cls(float(share), float(start), float(end))
        except ValueError as error:
            raise ValueError(f"a flash crowd is SHARE@START-END, such as 0.4@60-120, not {text!r}") from error


def with_flash_crowd(trace: Trace, crowd: FlashCrowd, adapter: int, seed: int = 0) -> Trace:
    """Return the trace; each request during the crowd asks for `adapter` (an index) with probability `crowd.share`."""
    rng = Random(seed)
    return [
        arrival._replace(adapter=adapter)
        if crowd.start <= arrival.time < crowd.end and rng.random() < crowd.share
        else arrival
        for arrival in trace
    ]


def with_tide(trace: Trace, period_s: float, depth: float, seed: int = 0) -> Trace:
    """Thin out a trace so that its rate follows a sine: as it is at the peak, and 1 - `depth` of that half a period
    later. The trace begins halfway between them, and keeps at least one request."""
    rng = Random(seed)
    kept = [a for a in trace if rng.random() < 1 - depth * (1 - sin(2 * pi * a.time / period_s)) / 2]
    return kept or trace[:1]


def with_batch_share(trace: Trace, share: float, seed: int = 0) -> Trace:
    """Return the trace with each request moved to the batch lane with probability `share`."""
    rng = Random(seed)
    return [arrival._replace(lane=Lane.BATCH) if rng.random() < share else arrival for arrival in trace]


def with_tenants(trace: Trace, count: int, seed: int = 0) -> Trace:
    """Return the trace with each request assigned to one of `count` tenants, `tenant-00` and so on, at random."""
    rng = Random(seed)
    return [arrival._replace(tenant=f"tenant-{rng.randrange(count):02}") for arrival in trace]


def adapter_ranks(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.choice(RANKS) for _ in range(count)]


class Zipf:
    """Draws, at each call, an index from 0 to `count` - 1, with a probability proportional to (index + 1)^-exponent."""

    def __init__(self, count: int, exponent: float, rng: Random) -> None:
        self._sums = list(accumulate(rank**-exponent for rank in range(1, count + 1)))
        self._rng = rng

    def __call__(self) -> int:
        return min(bisect_left(self._sums, self._rng.random() * self._sums[-1]), len(self._sums) - 1)
