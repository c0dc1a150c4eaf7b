"""Plots of recorded traffic: lengths of prompts and answers, and what prefix caches find."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

from engine.sim.analysis import Analysis, Spread
from engine.sim.plot import check_available

Line = tuple[list[int], list[float]]
"""Tokens, and shares."""


def draw_traffic(found: Mapping[str, Analysis], out: Path) -> None:
    """Write a plot to the file `out` in the format of its suffix: the shares of prompts and of answers that are at most
    so long, and what a prefix cache finds by its size, with a line for each trace. Raises what `check_available`
    raises."""
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
    """Return the label of a tick, such as 64, 4k (4,096) or 2M."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:g}"


def _found(found: Analysis) -> Line:
    return list(found.reuse.curve), list(found.reuse.curve.values())


def _cumulative(spread: Spread) -> Line:
    """Return lengths, and the share of requests that are at most so long."""
    total = sum(spread.bins.values())
    return list(spread.bins), [count / total for count in accumulate(spread.bins.values())]
