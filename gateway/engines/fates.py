"""Records how engine processes ended, as their successors report it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from engine.pb import engine_pb2 as pb

MAX_FATES = 4096
"""Maximum number of engine processes that are recorded. The oldest records are dropped."""


class Fates:
    """Records how engine processes ended, by process id (`life`). A running process is recorded as one that did not
    crash."""

    def __init__(self) -> None:
        self._fates: OrderedDict[str, pb.PreviousLife] = OrderedDict()
        self._told = asyncio.Event()
        """Event that is set, and replaced by a new one, whenever a record is added."""

    def of(self, life: str) -> pb.PreviousLife | None:
        """Return how a process ended; a process that still runs counts as not crashed. None means that this is not
        known yet."""
        return self._fates.get(life)

    async def learn(self, life: str) -> pb.PreviousLife:
        """Wait, without a time limit, until it is known how a process ended, and return it."""
        while life not in self._fates:
            await self._told.wait()
        return self._fates[life]

    def note_running(self, life: str) -> None:
        """Record that a process runs, as one that did not crash."""
        self._note(pb.PreviousLife(life=life))

    def note_successor(self, info: pb.EngineInfo, last_life: str) -> None:
        """Record how the previous process ended, as its successor reports in `info`. `last_life` is the process reached
        at the same place before, or empty."""
        # If it is neither the reporting process nor the reported one, its supervisor was replaced, too, and no process
        # will report its end: its requests are not blamed.
        if info.previous.life:
            self._note(info.previous)
        if last_life != info.life:
            self.note_untold(last_life)

    def note_untold(self, life: str) -> None:
        """Record a process as not crashed, because no successor will report how it ended. Does nothing if its end is
        recorded already, or if `life` is empty."""
        if life and life not in self._fates:
            self._note(pb.PreviousLife(life=life))

    def forget(self, life: str) -> None:
        """Drop the record of a process whose connection was lost. Only its successor knows whether it has ended, so
        `learn` waits for the successor's report."""
        self._fates.pop(life, None)

    def _note(self, fate: pb.PreviousLife) -> None:
        self._fates[fate.life] = fate
        while len(self._fates) > MAX_FATES:
            self._fates.popitem(last=False)
        told, self._told = self._told, asyncio.Event()
        told.set()
