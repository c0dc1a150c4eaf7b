"""Work that may have taken a gateway process with it is run alone, and given up when it has done so twice.

A process that dies takes up to a few hundred lines with it, and nothing says which of them it died of. The next process
that claims one of their shards finds that its lease was never handed back: the shard is *suspect*. Its lines are run
one after the other while no other line of a batch runs in the process, and each is marked in Redis before it is begun.
A mark that is found later belongs to a line that was alone when its process died. Marked lines are run last, and one
with `MOST_MARKS` marks is not run again: it fails as `process_lost`.

The tasks of a batch that run no lines (`gateway.batches.errand`) follow the same rule as a whole: each has a mark of
its own, and a task with `MOST_MARKS` marks is given up by name (`gateway.batches.given_up`).

A line that was under way at `MOST_ENGINE_LOSSES` deaths of an engine is run alone and marked likewise, and its mark
stays if the engine dies again.

A gateway that lost a lease and lives takes its mark back; a clean stop leaves none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.arrivals import EngineLost

MOST_MARKS = 2
LOST_CODE = "process_lost"
LOST_MESSAGE = (
    f"the gateway or engine process that ran this line ended unexpectedly {MOST_MARKS} times while no other line was "
    "running, so the line is not tried again"
)
MOST_ENGINE_LOSSES = 3
"""Deaths of an engine at which a line was under way, after which it is run alone. Engines die of other causes, too, and
lines that are run alone are slow."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is written down of a task whose processes may have died of it."""

    losses: int
    """How often a lease of the task ran out without having been handed back."""
    marks: Mapping[int, int]
    """Marks of the batch's lines by position."""
    task_marks: int = 0
    """Marks of the task itself."""

    @classmethod
    def read(cls, fields: Mapping[bytes, bytes], task: str) -> Trial:
        """Read the fields of a batch in Redis."""
        marks = {name[5:]: int(value) for name, value in fields.items() if name.startswith(b"mark:")}
        lines = {int(name): count for name, count in marks.items() if name.isdigit()}
        return cls(int(fields.get(f"lost:{task}".encode(), 0)), lines, marks.get(task.encode(), 0))


def is_engine_lost(error: BaseException) -> bool:
    """Return whether a request failed because the engine died while it had the request."""
    return isinstance(error.__cause__, EngineLost)


class Quarantine:
    """Keeps suspect shards and tasks apart from all other work on batches in this process."""

    def __init__(self) -> None:
        self._together = 0
        self._is_free = asyncio.Event()
        self._is_free.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._turn = asyncio.Lock()

    async def until_free(self) -> None:
        """Return when nothing suspect is being run, or waits for its turn."""
        await self._is_free.wait()

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Wait until nothing suspect wants to be alone, and count the block among what runs together."""
        while not self.enter():
            await self.until_free()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> bool:
        """Count a line or task among those that run together. False means that something suspect wants to be alone."""
        if not self._is_free.is_set():
            return False
        self._together += 1
        self._is_empty.clear()
        return True

    def leave(self) -> None:
        """Count a line or task as ended."""
        self._together -= 1
        if self._together == 0:
            self._is_empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Wait until no other line or task runs, and keep it so until the block ends."""
        async with self._turn:
            self._is_free.clear()
            try:
                await self._is_empty.wait()
                yield
            finally:
                self._is_free.set()
