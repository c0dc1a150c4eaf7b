"""Progress bar for the start of a server, from the conversion of the model to the last adapter."""

from __future__ import annotations

from enum import Enum
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Stage(Enum):
    """A part of the start. Its value is its duration in seconds, measured on two cores with the embedded model, and
    gives its share of the bar. With a larger model the bar moves unevenly."""

    CONVERTING = 10.0
    STARTING = 3.0
    LOADING = 2.0
    ADAPTERS = 1.0


class StartBar:
    """Shows one bar on a terminal until the start is over. If the console is not a terminal, it shows nothing.

    Stages follow each other. A stage that has nothing to do need not be reported.
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
        """Show what is being done, and how far its stage is (`share`, from 0 to 1). The bar never moves back."""
        stages = list(Stage)
        before = sum(earlier.value for earlier in stages[: stages.index(stage)])
        self._completed = max(self._completed, before + min(share, 1.0) * stage.value)
        self._bar.update(self._task, description=what, completed=self._completed)

    def close(self) -> None:
        """Remove the bar. Further calls have no effect."""
        self._bar.stop()
