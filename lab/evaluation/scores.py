"""Scores of models as lm-eval gives them, and their table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

Results = Mapping[str, Mapping[str, Any]]
"""lm-eval's results of one model: task or group -> `metric,filter` and `metric_stderr,filter` -> value."""


def score_table(found: Mapping[str, Results]) -> Table:
    """Return a table with a row for each model and a column for each metric of each task."""
    rows = {model: dict(_cells(results)) for model, results in found.items()}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    table = Table(box=None)
    table.add_column("model", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for model, row in rows.items():
        table.add_row(model, *(row.get(column, "-") for column in columns))
    return table


def _cells(results: Results) -> Iterator[tuple[str, str]]:
    """Yield, for each metric of each task, the title of its column and the text of its cell: the value and, if lm-eval
    gives one, the standard error."""
    for task, values in results.items():
        for name, value in values.items():
            metric, comma, kind = name.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = values.get(f"{metric}_stderr,{kind}")
                shown = f" ± {error:.4f}" if isinstance(error, int | float) else ""
                yield f"{task} {metric}" if kind == "none" else f"{task} {metric} {kind}", f"{value:.4f}{shown}"
