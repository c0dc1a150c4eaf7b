"""Percentiles of millions of durations in a few kilobytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

BINS_PER_E = 256
"""Bins a factor of e: one is 0.4 % wide, far below what a percentile of a simulation is worth."""
SHORTEST = 1e-9


class Histogram:
    """Durations in seconds, in log-spaced bins. Percentiles are exact to a bin's width."""

    __slots__ = ("_last", "_last_bin", "bins")

    def __init__(self) -> None:
        self.bins: Counter[int] = Counter()
        self._last, self._last_bin = 0.0, 0

    def add(self, seconds: float) -> None:
        # Neighbours in a batch have the same gap to the bit, so the logarithm is mostly saved.
        if seconds != self._last:
            self._last = seconds
            self._last_bin = math.floor(math.log(max(seconds, SHORTEST)) * BINS_PER_E)
        self.bins[self._last_bin] += 1

    @property
    def count(self) -> int:
        return self.bins.total()

    def percentile(self, share: float) -> float | None:
        """The duration that `share` of them do not exceed; None when there are none."""
        left = math.ceil(share * self.count)
        for index in sorted(self.bins):
            left -= self.bins[index]
            if left <= 0:
                return math.exp((index + 0.5) / BINS_PER_E)
        return None

    @classmethod
    def merged(cls, parts: Iterable[Histogram]) -> Histogram:
        whole = cls()
        for part in parts:
            whole.bins.update(part.bins)
        return whole


def percentile(values: Sequence[float], share: float) -> float | None:
    """Of sorted values, nearest rank; None when there are none."""
    if not values:
        return None
    return values[min(len(values) - 1, max(0, math.ceil(share * len(values)) - 1))]
