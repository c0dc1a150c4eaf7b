"""Follows a batch from a terminal: polls its state and shows it as a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import inf
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from gateway.cli.tables.batch import ENDED, duration_text, ended_lines

if TYPE_CHECKING:
    from gateway.cli.clients.batch import BatchClient, Json

PATIENCE_S = 120.0
"""Seconds that a gateway may be unreachable while a job is watched; longer than a gateway takes to restart."""
RETRY_S = 1.0

Told = Callable[[str], None]


def looks(client: BatchClient, batch_id: str, interval: float, timeout: float | None, told: Told) -> Iterator[Json]:
    """Poll a job every `interval` seconds and yield its state, until it has ended or `timeout` seconds have passed.

    While the gateway is away, `told` is called with the error message of each attempt.

    Raises:
        BatchError: there is no such job, or the gateway was away for too long.
    """
    until = inf if timeout is None else time.monotonic() + timeout
    while True:
        batch = _look(client, batch_id, told)
        yield batch
        left = until - time.monotonic()
        if batch["status"] in ENDED or left <= 0:
            return
        time.sleep(min(interval, left))


def _look(client: BatchClient, batch_id: str, told: Told) -> Json:
    from gateway.cli.clients.batch import AwayError

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
    """Shows a job's progress: a bar on a terminal, elsewhere a line for each new status. A context manager."""

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
    """Shows the recent rate in lines per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.1f} lines/s" if task.speed else "")
