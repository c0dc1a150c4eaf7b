"""Plots a router: cost against quality over its thresholds, and how well its probabilities are calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.sim.plot import check_available
from gateway.route_training.curve import Point


def draw(
    points: Sequence[Point], chosen: Point, bins: Sequence[tuple[float, float, float]], title: str, out: Path
) -> None:
    """Write a plot to the file `out` in the format of its suffix.

    Args:
        points: the curve, in order of cost.
        chosen: the point of the stored threshold.
        bins: see `fit.reliability`.

    Raises:
        What `check_available` raises.
    """
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
