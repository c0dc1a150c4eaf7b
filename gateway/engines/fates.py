"""How engine processes ended, as far as their successors have told."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from engine.pb import engine_pb2 as pb

MAX_FATES = 4096
"""Maximum number of engine processes of which is remembered how they ended."""


class Fates:
    """The ends of engine processes by the processes' ids. A process that runs counts as one that did not crash."""

    def __init__(self) -> None:
        self._fates: OrderedDict[str, pb.PreviousLife] = OrderedDict()
        self._told = asyncio.Event()
        """Set, and replaced, when something becomes known."""

    def of(self, life: str) -> pb.PreviousLife | None:
        """Return how a process ended. None means that this is not known yet."""
        return self._fates.get(life)

    async def learn(self, life: str) -> pb.PreviousLife:
        """Wait, without a time limit, until it is known how a process ended, and return it."""
        while life not in self._fates:
            await self._told.wait()
        return self._fates[life]

    def note_running(self, life: str) -> None:
        """Note that a process runs."""
        self._note(pb.PreviousLife(life=life))

    def note_successor(self, info: pb.EngineInfo, last_life: str) -> None:
        """Note what a process tells of the one before it. If that is not `last_life`, the process which was reached at
        the same place before (empty: none was), no process will ever tell how `last_life` ended: its supervisor or its
        pod was replaced, too. Its requests are not blamed then."""
        if info.previous.life:
            self._note(info.previous)
        if last_life != info.life:
            self.note_untold(last_life)

    def note_untold(self, life: str) -> None:
        """Note that no successor will tell how a process ended, unless one has. An empty `life` means no process."""
        if life and life not in self._fates:
            self._note(pb.PreviousLife(life=life))

    def forget(self, life: str) -> None:
        """Note that a process which ran is out of reach: only its successor knows whether it has ended."""
        self._fates.pop(life, None)

    def _note(self, fate: pb.PreviousLife) -> None:
        self._fates[fate.life] = fate
        while len(self._fates) > MAX_FATES:
            self._fates.popitem(last=False)
        told, self._told = self._told, asyncio.Event()
        told.set()
