"""Measured values of a benchmark with their goals, and a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    what: str
    value: float
    goal: str = ""
    is_met: bool = True


def figures_table(title: str, figures: Sequence[Figure]) -> Table:
    result = Table(title=title)
    for column in ("", "measured", "goal", "met"):
        result.add_column(column, justify="left" if not column else "right")
    for figure in figures:
        met = "yes" if figure.is_met else "no"
        result.add_row(figure.what, f"{figure.value:.4g}", figure.goal, met if figure.goal else "")
    return result
