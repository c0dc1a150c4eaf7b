"""The progress bar of a server's start, from the conversion of the model to the last adapter."""

from __future__ import annotations

from enum import Enum
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Stage(Enum):
    """A part of the start. The value is its share of a start that has all of them, in seconds measured on two cores
    with the embedded model; a larger model moves the bar unevenly."""

    CONVERTING = 10.0
    STARTING = 3.0
    LOADING = 2.0
    ADAPTERS = 1.0


class StartBar:
    """Shows one bar on a terminal, which disappears when the start is over, and nothing elsewhere.

    Stages follow each other; one that has nothing to do is skipped without being reported.
    """

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=sum(stage.value for stage in Stage))
        self._completed = 0.0

    def __enter__(self) -> StartBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def report(self, stage: Stage, what: str, share: float = 0.0) -> None:
        """Say what is being done, and which share of its stage is done, from 0 to 1."""
        stages = list(Stage)
        before = sum(earlier.value for earlier in stages[: stages.index(stage)])
        self._completed = max(self._completed, before + min(share, 1.0) * stage.value)
        self._bar.update(self._task, description=what, completed=self._completed)

    def close(self) -> None:
        """Remove the bar. May be called again."""
        self._bar.stop()
