"""Plots: of simulations, latency over throughput, with a line for each policy and a point for each rate; of recorded
traffic, lengths of prompts and answers, and what prefix caches find."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from lab.traffic.analysis import Analysis, Spread


class Measured(Protocol):
    """Interface of a report that `draw` can plot: that of a simulated engine or cluster."""

    @property
    def tokens_per_s(self) -> float: ...

    def interactive_p99(self, name: str) -> float | None: ...


Curves = Mapping[str, Sequence[tuple[float, Measured]]]
"""Policy -> points in order of rate, each with its rate scale (a factor of the arrival rate) and its report."""
Line = tuple[list[int], list[float]]
"""The points of a line: numbers of tokens (x), and shares of tokens or of requests from 0 to 1 (y)."""
PANELS = (("TTFT", "ttft"), ("ITL", "itl"))
TICKS = (1.0, 2.0, 5.0)
"""Multiples of each power of ten that have a tick on the logarithmic axis."""


def duration_label(seconds: float) -> str:
    """Return the label of a tick on a time axis, such as 500 us, 20 ms or 2 s."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.999 * size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"


def tick_range(low: float, high: float) -> tuple[float, float]:
    """Return the nearest ticks below `low` and above `high`, both positive seconds, as limits of a logarithmic axis."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    ticks = [step * 10.0**decade for decade in decades for step in TICKS]
    return max(tick for tick in ticks if tick < low), min(tick for tick in ticks if tick > high)


class PlotUnavailable(RuntimeError):
    """Raised if matplotlib is not installed; the message says how to install it."""


def check_available(out: Path) -> None:
    """Check that a plot can be written to `out`. Raises PlotUnavailable if matplotlib is not installed, and ValueError
    if the file's suffix does not name a known format."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotUnavailable("plots need matplotlib: pip install 'loralane[plot]'") from error
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if out.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"cannot draw {out.name}: its suffix must be one of {', '.join(known)}")


def draw(curves: Curves, title: str, out: Path) -> None:
    """Write a plot of interactive p99 TTFT and ITL over generated tokens/s, one panel each, to the file `out` in the
    format of its suffix. Raises what `check_available` raises."""
    check_available(out)
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, (label, name) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for policy, points in curves.items():
            line = [(report.tokens_per_s, report.interactive_p99(name), rate) for rate, report in points]
            known = [(x, y, rate) for x, y, rate in line if y is not None]
            axes.plot([x for x, _, _ in known], [y for _, y, _ in known], marker="o", label=policy)
            for x, y, rate in known:
                axes.annotate(f"{rate:g}x", (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
        axes.set(xlabel="generated tokens/s, both lanes", ylabel=f"interactive p99 {label}", yscale="log")
        seconds = [value for line in axes.get_lines() for value in line.get_ydata() if value > 0]
        if seconds:
            axes.set_ylim(*tick_range(min(seconds), max(seconds)))
        axes.yaxis.set_major_locator(LogLocator(subs=TICKS))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration_label(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(out, dpi=150)


def draw_traffic(found: Mapping[str, Analysis], out: Path) -> None:
    """Write a plot to the file `out` in the format of its suffix: the distributions of prompt and answer lengths, and
    what prefix caches find, with a line for each trace. Raises what `check_available` raises."""
    check_available(out)
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, PercentFormatter

    lines: list[tuple[str, str, dict[str, Line]]] = [
        ("prompt tokens", "requests at most so long", {name: _cumulative(one.prompt) for name, one in found.items()}),
        ("output tokens", "requests at most so long", {name: _cumulative(one.output) for name, one in found.items()}),
        ("tokens in a prefix cache", "prompt tokens found", {name: _found(one) for name, one in found.items()}),
    ]
    panels = lines if any(one.reuse.curve for one in found.values()) else lines[:2]
    figure = Figure(figsize=(4.2 * len(panels), 4), layout="constrained")
    for axes, (xlabel, ylabel, curves) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name, line in curves.items():
            axes.plot(*line, marker=".", label=name)
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log")
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=7))
        axes.xaxis.set_minor_locator(LogLocator(base=2, numticks=0))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_label(value)))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(visible=True, alpha=0.3)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    figure.savefig(out, dpi=100)


def tokens_label(tokens: float) -> str:
    """Return the label of a tick on an axis of token counts, such as 64, 4k (4,096) or 2M."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:g}"


def _found(found: Analysis) -> Line:
    return list(found.reuse.curve), list(found.reuse.curve.values())


def _cumulative(spread: Spread) -> Line:
    """Return the points of a cumulative distribution: lengths in tokens, and the share of requests that are at most so
    long."""
    total = sum(spread.bins.values())
    return list(spread.bins), [count / total for count in accumulate(spread.bins.values())]
