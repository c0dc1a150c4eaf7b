"""Keeps what is suspect (`gateway.batches.trial`) apart from all other work on batches in one gateway process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Quarantine:
    """Suspects run one at a time, with no other line or task beside them.

    Between two suspects other work is let in for as long as the last one kept it out, if any was kept out: a tenant
    whose lines are suspect takes at most half of the process from other tenants.
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
        """For how many seconds it did."""

    async def until_free(self) -> None:
        """Return when nothing suspect is being run, or waits only for other work to end."""
        self._has_kept_out |= not self._is_free.is_set()
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
    async def turn(self) -> AsyncIterator[None]:
        """Wait until it is a suspect's turn. Other work goes on meanwhile, and until the suspect is `apart`."""
        async with self._turn:
            yield

    @asynccontextmanager
    async def apart(self) -> AsyncIterator[None]:
        """In its turn, wait until no other line or task runs, and keep it so until the block ends."""
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
        async with self.turn(), self.apart():
            yield
