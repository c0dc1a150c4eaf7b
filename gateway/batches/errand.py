"""A task of a batch that has no lines: to check its input, to write its files, to sweep up behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from gateway.batches.lease import Lease
from gateway.batches.store import BatchStore


class Errand:
    """`Work` that is done as a whole, or handed back as it was."""

    def __init__(self, lease: Lease, store: BatchStore, work: Coroutine[None, None, None]) -> None:
        self.lease = lease
        self._store = store
        self._task = asyncio.create_task(work, name=f"batch-{lease.member}")
        self._is_lost = False

    async def run(self) -> None:
        """Raises whatever the work does."""
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise
        if not self._task.cancelled():
            self._task.result()
        elif not self._is_lost:
            await self._store.release(self.lease)

    def lose(self) -> None:
        self._is_lost = True
        self._task.cancel()

    def end(self) -> None:
        self._task.cancel()

    def drain(self) -> None:
        """Somebody else may do it at once."""
        self.end()
