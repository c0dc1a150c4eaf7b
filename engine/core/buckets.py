"""Counts of values by size, as a Prometheus histogram has them."""

from __future__ import annotations

from bisect import bisect_left

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
SIZES = tuple(1 << power for power in range(15))
"""1 to 16,384, in powers of two."""


class Buckets:
    """Numbers of values in ranges, and their sum. Adding a value takes under a microsecond."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` are the inclusive upper bounds of all ranges but the last, ascending."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of values in each range; the last range has no upper bound."""
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
