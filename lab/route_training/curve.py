"""The curve of cost against quality over the thresholds of a router, the choice of a threshold on it, and its plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from lab.plot import check_available

Floats = npt.NDArray[np.float64]

MOST_POINTS = 512


class Arm(Struct, frozen=True):
    """Scores and costs of one member's answers to each of n prompts."""

    scores: Floats
    """Scores of the answers, [n]."""
    costs: Floats
    """Costs of the answers, [n], in any unit."""


class Point(Struct, frozen=True):
    """Mean cost and quality of the answers with one threshold of the router."""

    threshold: float
    cost: float
    """Mean cost of a request, in multiples of the argument `unit` of `curve`."""
    quality: float
    """Mean score of the answers."""
    small_share: float
    """Share of requests that the small member answers."""


def curve(
    chances: Floats, small: Arm, large: Arm, unit: float = 1.0, bounds: tuple[float, float] = (0, 1)
) -> list[Point]:
    """Return points in order of falling shares of the small member, from all small to all large, at `bounds`.

    Args:
        chances: [n], compared with the threshold, such as the probability that the small member suffices.
        small, large: the answers to prompts that reach the threshold, and to others.
        unit: the cost that counts as 1.
    """
    order = np.argsort(-chances, kind="stable")
    ranked, count = chances[order], len(chances)
    scores, costs = (_sums(values[order], others[order]) / count for values, others in _pairs(small, large))
    ends = np.append(np.flatnonzero(np.diff(ranked)) + 1, count)  # requests of one probability go together
    taken = np.unique(np.append(ends[np.linspace(0, len(ends) - 1, min(MOST_POINTS, len(ends))).astype(int)], 0))
    return [
        Point(_threshold(ranked, number, bounds), float(costs[number] / unit), float(scores[number]), number / count)
        for number in taken[::-1].tolist()
    ]


def _pairs(small: Arm, large: Arm) -> tuple[tuple[Floats, Floats], ...]:
    return ((small.scores, large.scores), (small.costs, large.costs))


def _sums(small: Floats, large: Floats) -> Floats:
    """Return n + 1 sums. The one with index k adds the first k values of `small` and the other n - k of `large`."""
    return large.sum() + np.concatenate(([0.0], np.cumsum(small - large)))


def _threshold(ranked: Floats, number: int, bounds: tuple[float, float]) -> float:
    """Return a threshold that exactly the first `number` of the falling chances `ranked` reach, between two of them or
    an end of `bounds`."""
    if number == 0:
        return bounds[1]
    return bounds[0] if number == len(ranked) else float((ranked[number - 1] + ranked[number]) / 2)


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
    return min((point for point in points if point.quality >= least - 1e-12), key=lambda point: point.cost)


def draw(
    points: Sequence[Point], chosen: Point, bins: Sequence[tuple[float, float, float]], title: str, out: Path
) -> None:
    """Write a plot of cost against quality, at `points` and the stored threshold's, `chosen`, and of the calibration of
    `bins` (see `fit.reliability`), to the file `out`. Raises what `check_available` raises."""
    check_available(out)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    costs, calibration = figure.subplots(1, 2)
    first, last = points[0], points[-1]
    costs.plot([point.cost for point in points], [point.quality for point in points], label="learned")
    costs.plot([first.cost, last.cost], [first.quality, last.quality], "k:", label="random")
    costs.plot(first.cost, first.quality, "s", color="tab:green", label="small alone")
    costs.plot(last.cost, last.quality, "s", color="tab:red", label="large alone")
    costs.plot(chosen.cost, chosen.quality, "o", color="tab:blue", label=f"threshold {chosen.threshold:.3g}")
    costs.set(xlabel="cost of a request, large = 1", ylabel="quality", xlim=(0, None))
    calibration.plot([said for said, _, _ in bins], [true for _, true, _ in bins], "o-", label="held-out prompts")
    calibration.plot([0, 1], [0, 1], "k:", label="calibrated")
    calibration.set(xlabel="predicted probability that small suffices", ylabel="share for which it does")
    for axes in (costs, calibration):
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(out, dpi=120)
