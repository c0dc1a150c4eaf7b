"""Plots a sweep: latencies and throughput over the request rate, with the goals and the knee."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lab.bench.sweep import Sweep
from lab.plot import TICKS, check_available, duration_label, tick_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"))
QUANTILES = (("p50", "p50"), ("p90", "p90"), ("p99", "p99"))


def draw(sweep: Sweep, title: str, out: Path) -> None:
    """Write a plot to the file `out` in the format of its suffix: TTFT, TPOT and ITL of the first lane, and throughput,
    with goals dashed and the knee dotted. Raises what `check_available` raises."""
    check_available(out)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4), layout="constrained")
    *latencies, throughput = figure.subplots(1, len(PANELS) + 1)
    for axes, (label, name) in zip(latencies, PANELS, strict=True):
        _draw_latency(axes, sweep, label, name)
    rates = [point.rate for point in sweep.points]
    throughput.plot(rates, [point.lane.output_tokens_per_second for point in sweep.points], marker="o", label="output")
    throughput.plot(rates, [point.lane.prompt_tokens_per_second for point in sweep.points], marker="o", label="prefill")
    throughput.set(ylabel="tokens/s", ylim=(0, None))
    for axes in (*latencies, throughput):
        axes.set(xlabel="requests/s")
        axes.grid(visible=True, which="both", alpha=0.3)
        if sweep.knee is not None:
            axes.axvline(sweep.knee, color="black", linestyle=":", label=f"knee, {sweep.knee:.3g}/s")
        axes.legend()
    figure.suptitle(title)
    figure.savefig(out, dpi=120)


def _draw_latency(axes: Axes, sweep: Sweep, label: str, name: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    drawn: list[float] = []
    for key, text in QUANTILES:
        known = [(point.rate, getattr(values, key)) for point in sweep.points if (values := getattr(point.lane, name))]
        axes.plot([rate for rate, _ in known], [seconds for _, seconds in known], marker="o", label=text)
        drawn += [seconds for _, seconds in known if seconds > 0]
    goodput = sweep.points[0].lane.goodput
    goal = getattr(goodput.slo, name) if goodput else None
    if goal:
        axes.axhline(goal, color="red", linestyle="--", label="goal")
        drawn.append(goal)
    axes.set(ylabel=label, yscale="log")
    if drawn:
        axes.set_ylim(*tick_range(min(drawn), max(drawn)))
    axes.yaxis.set_major_locator(LogLocator(subs=TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration_label(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
