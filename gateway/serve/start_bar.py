"""Progress bar for the start of a server, from the preparation of the model to the last adapter."""

from __future__ import annotations

import asyncio
from enum import Enum, auto

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gateway.serve.engine_group import EngineGroup
from gateway.terminal.console import Console

LOOK_SECONDS = 0.2
"""Seconds between two polls of the engine's progress."""


class StartStage(Enum):
    """Stage of a server's start. The members are in the order in which the stages follow each other."""

    PREPARING = auto()
    STARTING = auto()
    COMPILING = auto()
    LOADING = auto()
    CAPTURING = auto()
    WARMING = auto()
    ADAPTERS = auto()


SECONDS = dict(zip(StartStage, (5.0, 3.0, 1.0, 1.0, 0.25, 0.25, 0.5), strict=True))
"""Typical duration of each stage in seconds (two cores, the embedded model), which gives the stage's share of the
bar."""
ENGINE_STAGES = {
    "compiling kernels": StartStage.COMPILING,
    "loading weights": StartStage.LOADING,
    "capturing graphs": StartStage.CAPTURING,
    "warming up": StartStage.WARMING,
}
"""Text with which an engine reports a part of its start -> stage."""


class StartBar:
    """Progress bar for a server's start, shown from the first `report` until `close`; nothing is shown if the console
    is not a terminal. The bar begins with the stage that is reported first; later stages may be skipped."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._is_shown = console.is_interactive
        # Standard output and error stay as they are: what writes to them later, such as the request log, would
        # otherwise keep the bar's redirection for good.
        self._bar = Progress(
            *columns,
            *times,
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not self._is_shown,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._first: StartStage | None = None
        self._completed = 0.0
        self._is_closed = False

    @classmethod
    def hidden(cls) -> StartBar:
        """Return a bar that shows nothing."""
        return cls(Console(quiet=True, force_interactive=False))

    def report(self, stage: StartStage, what: str, share: float = 0.0) -> None:
        """Show the text `what`, and move the bar, never backwards, to `share` (0 to 1) of a stage. After `close`,
        nothing is shown."""
        stages, self._first = list(StartStage), self._first or stage
        begun = stages[stages.index(self._first) :]
        before = sum(SECONDS[earlier] for earlier in begun if earlier.value < stage.value)
        self._completed = max(self._completed, before + min(share, 1.0) * SECONDS[stage])
        total = sum(SECONDS[each] for each in begun)
        self._bar.update(self._task, description=what, completed=self._completed, total=total)
        if self._is_shown and not self._is_closed:
            self._bar.start()

    async def follow(self, engines: EngineGroup) -> None:
        """Poll the engines' progress every LOOK_SECONDS and show it, until the bar is closed. Returns at once if the
        bar is not shown."""
        self.report(StartStage.STARTING, "starting the engine")
        while self._is_shown and not self._is_closed:
            await asyncio.sleep(LOOK_SECONDS)
            if (loading := engines.loading) is not None:
                stage = ENGINE_STAGES.get(loading.what, StartStage.STARTING)
                what = f"{loading.what}: {loading.done} of {loading.total}"
                self.report(stage, what, loading.done / max(loading.total, 1))

    def close(self) -> None:
        """Remove the bar from the terminal for good. A second call does nothing."""
        self._is_closed = True
        if self._is_shown:  # or the library would print an empty line
            self._bar.stop()
