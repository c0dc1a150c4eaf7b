"""Shows batches on a terminal: tables, and a progress bar that follows a running batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from gateway.terminal.console import Console

if TYPE_CHECKING:
    from gateway.cli.batch_client import BatchClient, Json


PATIENCE_S = 120.0
"""Seconds that a gateway may be unreachable while a job is watched; longer than a gateway takes to restart."""
RETRY_S = 1.0

Told = Callable[[str], None]


def poll_batch(
    client: BatchClient, batch_id: str, interval: float, timeout: float | None, told: Told
) -> Iterator[Json]:
    """Poll a job every `interval` seconds and yield its JSON, until it has ended or `timeout` seconds (None: no limit)
    have passed. While the gateway is away, `told` is called with the error message of each attempt. Raises
    BatchClientError if the gateway refuses a query, as for an unknown job, or is away for over PATIENCE_S seconds."""
    until = inf if timeout is None else time.monotonic() + timeout
    while True:
        batch = _look(client, batch_id, told)
        yield batch
        left = until - time.monotonic()
        if batch["status"] in ENDED or left <= 0:
            return
        time.sleep(min(interval, left))


def _look(client: BatchClient, batch_id: str, told: Told) -> Json:
    from gateway.cli.batch_client import AwayError

    patient_until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return client.get(batch_id)
        except AwayError as error:
            if time.monotonic() >= patient_until:
                raise
            told(str(error))
            time.sleep(RETRY_S)


class BatchBar:
    """Context manager that shows a job's progress: a bar on a terminal, elsewhere a line for each new status."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[counts]}"),
            RateColumn(),
            TextColumn("{task.fields[eta]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, counts="", eta="")
        self._shown = ""

    def __enter__(self) -> BatchBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, batch: Json) -> None:
        counts, status = batch["request_counts"], batch["status"]
        done, eta = ended_lines(batch), batch.get("eta_seconds")
        text = f"{done:,} of {counts['total']:,}, {counts['failed']:,} failed" if counts["total"] else ""
        self._progress.update(
            self._task,
            description=status,
            total=counts["total"] or None,
            completed=done,
            counts=text,
            eta="" if eta is None else f"{duration_text(eta)} left",
        )
        if not self._console.is_terminal and status != self._shown:
            self.note(f"{status} {text}".strip())
        self._shown = status

    def note(self, text: str) -> None:
        self._progress.console.print(text, style="dim", highlight=False, markup=False)


class RateColumn(ProgressColumn):
    """Column of a progress bar with the recent rate in lines per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.1f} lines/s" if task.speed else "")


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
    """Return a table with a row for each field of a job, in readable units, except for empty fields, `object` and the
    file's errors."""
    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(batch):
        table.add_row(name.replace("_", " "), value)
    return table


def errors_table(batch: Json) -> Table:
    """Return a table of the first MOST_ERRORS errors of a job's input file; the job's `errors` must not be None."""
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
