"""The curve of cost against quality over the thresholds of a router, and the choice of a threshold on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Floats = npt.NDArray[np.float64]

MOST_POINTS = 512


class Prices(Struct, frozen=True):
    """What an answer costs, as shares of the large member's price."""

    small: float
    large: float = 1.0
    always: float = 0.0
    """Cost of each request, whichever member answers it, such as the prefill for the prompt's vector."""


class Point(Struct, frozen=True):
    """What a threshold yields."""

    threshold: float
    cost: float
    """Mean cost of a request, as a share of the large member's price."""
    quality: float
    """Mean score of the answers."""
    small_share: float
    """Share of requests that the small member answers."""


def curve(probabilities: Floats, small: Floats, large: Floats, prices: Prices) -> list[Point]:
    """Return points in order of cost, from all small to all large.

    Args:
        probabilities: that the small member suffices, [n].
        small, large: scores of the members' answers, [n].
    """
    order = np.argsort(-probabilities, kind="stable")
    ranked = probabilities[order]
    gains = np.concatenate(([0.0], np.cumsum((small - large)[order])))
    count = len(ranked)
    ends = np.append(np.flatnonzero(np.diff(ranked)) + 1, count)  # requests of one probability go together
    taken = np.unique(np.append(ends[np.linspace(0, len(ends) - 1, min(MOST_POINTS, len(ends))).astype(int)], 0))
    points = []
    for number in taken[::-1].tolist():
        share = number / count
        cost = prices.always + share * prices.small + (1 - share) * prices.large
        quality = float(large.mean() + gains[number] / count)
        points.append(Point(_threshold(ranked, number), cost, quality, share))
    return points


def _threshold(ranked: Floats, number: int) -> float:
    """Return the threshold that exactly the first `number` of falling probabilities reach: half-way to the next one."""
    if number == 0:
        return 1.0
    return 0.0 if number == len(ranked) else float((ranked[number - 1] + ranked[number]) / 2)


def choose(points: Sequence[Point], max_loss: float | None, max_cost: float | None) -> Point:
    """Return the cheapest point whose quality is at most `max_loss` below that of the large member or, if `max_cost` is
    given, the best one that costs at most that. Raises ValueError if no threshold costs so little."""
    if max_cost is not None:
        affordable = [point for point in points if point.cost <= max_cost]
        if not affordable:
            raise ValueError(
                f"no threshold costs at most {max_cost:g}; the small member alone costs {points[0].cost:.3g}"
            )
        return max(affordable, key=lambda point: (point.quality, -point.cost))
    least = points[-1].quality - (max_loss or 0.0)
    return next(point for point in points if point.quality >= least - 1e-12)


def recovered(points: Sequence[Point], max_cost: float) -> float:
    """Return the largest share of the gap in quality between the members that a point of at most this cost recovers."""
    low, high = points[0].quality, points[-1].quality
    return max((point.quality - low) / (high - low) for point in points if point.cost <= max_cost)
