"""Renders batches for the terminal: a table of many, all fields of one, and the errors of an input file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from rich.table import Table
from rich.text import Text

Json = Mapping[str, Any]

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
COLOURS: Mapping[str, str] = {"completed": "green", "failed": "red", "expired": "red", "cancelled": "yellow"}
TITLES = ("id", "status", "lines", "done", "failed", "left", "created", "expires", "endpoint")
MOST_ERRORS = 20
"""Maximum number of a file's errors shown in a terminal; --json prints all that the gateway reports."""


def batches_table(batches: Iterable[Json]) -> Table:
    table = Table(box=None)
    for title in TITLES:
        table.add_column(title, justify="right" if title in ("lines", "done", "failed", "left") else "left")
    for batch in batches:
        table.add_row(*_cells(batch))
    return table


def batch_facts(batch: Json) -> Table:
    """Return a table of the fields of one job, one a row. Fields that are null are left out."""
    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(batch):
        table.add_row(name.replace("_", " "), value)
    return table


def errors_table(batch: Json) -> Table:
    """Return a table of the first MOST_ERRORS errors of a job's input file."""
    table = Table(box=None)
    for title in ("line", "code", "message"):
        table.add_column(title, justify="right" if title == "line" else "left", overflow="fold")
    for error in batch["errors"]["data"][:MOST_ERRORS]:
        line = error.get("line")
        table.add_row("-" if line is None else f"{line:,}", error["code"], Text(error["message"]))
    return table


def ended_lines(batch: Json) -> int:
    counts = batch["request_counts"]
    return counts["completed"] + counts["failed"]


def status_text(batch: Json) -> Text:
    status = batch["status"]
    return Text(status, COLOURS.get(status, ""))


def duration_text(seconds: float) -> str:
    """Format a duration in its largest unit and the next smaller one, such as `1 min 15 s`."""
    whole = round(seconds)
    for unit, size, part, part_size in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part_size} {part}"
    return f"{whole} s"


def _cells(batch: Json) -> Iterable[Text | str]:
    counts, eta = batch["request_counts"], batch.get("eta_seconds")
    yield batch["id"]
    yield status_text(batch)
    for name in ("total", "completed", "failed"):
        yield f"{counts[name]:,}"
    yield "-" if eta is None else duration_text(eta)
    yield _when(batch["created_at"])
    yield "-" if batch.get("expires_at") is None else _when(batch["expires_at"])
    yield batch["endpoint"]


def _facts(batch: Json) -> Iterable[tuple[str, Text | str]]:
    for name, value in batch.items():
        if value is None or name in ("object", "errors"):
            continue
        if name == "status":
            yield name, status_text(batch)
        elif name == "eta_seconds":
            yield "left", duration_text(value)
        elif name.endswith("_at"):
            yield name, _when(value)
        elif isinstance(value, dict):
            if value:
                yield name, Text(", ".join(_pairs(value)))
        else:
            yield name, Text(str(value))


def _pairs(value: Json, prefix: str = "") -> Iterable[str]:
    for name, item in value.items():
        label = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(item, dict):
            yield from _pairs(item, f"{label}: ")
        else:
            yield f"{label} {item:,}" if isinstance(item, int) else f"{label} {item}"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
