"""Isolates suspect work (`gateway.batches.trial`) from all other work on batches in one gateway process."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Quarantine:
    """Runs suspect lines and tasks (their process may have died of them) one at a time, while no other line or task of
    a batch runs in this process.

    If a suspect kept other work waiting, the next suspect waits for as long as the last one took. A tenant whose lines
    are suspect thus takes at most half of the process's time from other tenants.
    """

    def __init__(self) -> None:
        self._together = 0
        self._is_free = asyncio.Event()
        self._is_free.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._is_taken = asyncio.Lock()
        """Lock that the suspect which runs, or is the next to run, holds."""
        self._has_kept_out = False
        """True if the last suspect kept other work waiting."""
        self._rest = 0.0
        """Seconds for which the last suspect kept ordinary work out, from its request to be alone until its end."""

    async def until_free(self) -> None:
        """Wait until no suspect runs or waits to be alone. A wait here makes the next suspect pause (`alone`)."""
        self._has_kept_out |= not self._is_free.is_set()
        await self._is_free.wait()

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Wait until no suspect runs or waits to be alone, and count the body as ordinary work until exit."""
        while not self.enter():
            await self.until_free()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> bool:
        """Count a line or task as running ordinary work and return True, or return False if a suspect runs or waits to
        be alone. After True, the caller must call `leave`."""
        if not self._is_free.is_set():
            return False
        self._together += 1
        self._is_empty.clear()
        return True

    def leave(self) -> None:
        """Count a line or task that `enter` counted as ended, which may let a waiting suspect run."""
        self._together -= 1
        if self._together == 0:
            self._is_empty.set()

    @asynccontextmanager
    async def suspect_turn(self, model: str) -> AsyncIterator[None]:
        """Let only one suspect line of each base model at a time run the body, in which it waits for an engine and then
        runs. Ordinary work goes on meanwhile, and so do the suspects of other base models, which need not wait for this
        one's engine."""
        async with self._turns[model]:
            yield

    @asynccontextmanager
    async def apart(self) -> AsyncIterator[None]:
        """Run the body as a suspect beside ordinary work: wait only until no other suspect runs."""
        async with self._is_taken:
            yield

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Run the body as a suspect: wait until no other suspect runs, pause for as long as the last one took if it
        kept other work waiting, then admit no more ordinary work and wait until none runs. On exit, ordinary work is
        admitted again."""
        async with self._is_taken:
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
