"""Percentiles of millions of durations in a few kilobytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

BINS_PER_E = 256
"""Bins per factor of e. A bin is 0.4 % wide, far below the precision of a simulated percentile."""
SHORTEST = 1e-9
"""Shortest duration in seconds that a histogram distinguishes; shorter ones count as this."""


class Histogram:
    """A histogram of durations in seconds with logarithmic bins. Percentiles are exact to the width of a bin."""

    __slots__ = ("_last", "_last_bin", "bins")

    def __init__(self) -> None:
        self.bins: Counter[int] = Counter()
        self._last, self._last_bin = 0.0, 0

    def add(self, seconds: float) -> None:
        # Requests of one batch have exactly the same gap, so most calls can reuse the last logarithm.
        if seconds != self._last:
            self._last = seconds
            self._last_bin = math.floor(math.log(max(seconds, SHORTEST)) * BINS_PER_E)
        self.bins[self._last_bin] += 1

    @property
    def count(self) -> int:
        return self.bins.total()

    def percentile(self, share: float) -> float | None:
        """Return the duration in seconds that a fraction `share`, from 0 to 1, of all durations do not exceed, to the
        width of a bin. None means that there are no durations."""
        left = math.ceil(share * self.count)
        for index in sorted(self.bins):
            left -= self.bins[index]
            if left <= 0:
                return _middle(index)
        return None

    @property
    def mean(self) -> float | None:
        """Mean duration in seconds, to the width of a bin. None means that there are no durations."""
        count = self.count
        return sum(number * _middle(index) for index, number in self.bins.items()) / count if count else None

    @classmethod
    def merged(cls, parts: Iterable[Histogram]) -> Histogram:
        whole = cls()
        for part in parts:
            whole.bins.update(part.bins)
        return whole


def _middle(index: int) -> float:
    return math.exp((index + 0.5) / BINS_PER_E)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value that a fraction `share`, from 0 to 1, of the ascending `values` do not exceed, by nearest rank.
    None means that there are no values."""
    if not values:
        return None
    return values[min(len(values) - 1, max(0, math.ceil(share * len(values)) - 1))]
