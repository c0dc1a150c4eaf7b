"""Isolates suspect work (`gateway.batches.trial`) from all other work on batches in one gateway process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Quarantine:
    """Lets suspects run one at a time, with no other line or task beside them.

    If a suspect kept other work waiting, the next suspect waits for as long as the last one took. A tenant whose lines
    are suspect thus takes at most half of the process's time from other tenants.
    """

    def __init__(self) -> None:
        self._together = 0
        self._is_free = asyncio.Event()
        self._is_free.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._turn = asyncio.Lock()
        self._has_kept_out = False
        """True if the last suspect kept other work waiting."""
        self._rest = 0.0
        """Seconds that the last suspect took, from asking to be alone until its end."""

    async def until_free(self) -> None:
        """Wait until no suspect runs or waits to be alone."""
        self._has_kept_out |= not self._is_free.is_set()
        await self._is_free.wait()

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Wait until no suspect wants to be alone, and count the block as work that runs together."""
        while not self.enter():
            await self.until_free()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> bool:
        """Count a line or task as work that runs together. False means that a suspect wants to be alone."""
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
    async def suspect_turn(self) -> AsyncIterator[None]:
        """Wait for a suspect's turn. Other work goes on until the suspect runs `exclusively`."""
        async with self._turn:
            yield

    @asynccontextmanager
    async def exclusively(self) -> AsyncIterator[None]:
        """In a `suspect_turn`, wait until no other line or task runs, and keep others out until the block ends."""
        if self._has_kept_out:
            await asyncio.sleep(self._rest)
        loop = asyncio.get_running_loop()
        began, self._has_kept_out = loop.time(), False
        self._is_free.clear()
        try:
            await self._is_empty.wait()
            yield
        finally:
            self._is_free.set()
            self._rest = loop.time() - began

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Keep all other work out for the block, as soon as it is the caller's turn."""
        async with self.suspect_turn(), self.exclusively():
            yield
