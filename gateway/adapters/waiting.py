"""Configured adapters that are not applied yet. Those that could not be loaded are listed with their error, and the
gateway tries them again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from gateway.adapters.mirror import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS
from gateway.adapters.record import AdapterRecord, new_record
from gateway.core.errors import ApiError

log = structlog.get_logger("adapters")


class WaitingSeeds:
    """Configured adapters that this gateway could not load, with the reasons. A background task tries all of them again
    after 1, 2, ... 60 s."""

    def __init__(self, seed: Callable[[str, str], Awaitable[str]], clock: Callable[[], float]) -> None:
        """`seed` loads the adapter of a name and source, and returns why that failed; empty if it did not. `clock`
        returns the Unix time in seconds."""
        self._seed = seed
        self._clock = clock
        self.records: dict[str, AdapterRecord] = {}
        """Record, by name, of each adapter that waits. It has no version."""
        self.errors: dict[str, str] = {}
        self.expected: dict[str, str] = {}
        """Configured source, by name, of each adapter that waits or that is about to be loaded."""
        self._task: asyncio.Task[None] | None = None

    def add(self, name: str, source: str, reason: str) -> None:
        """List an adapter that could not be loaded from its configured source, and try it again until that succeeds or
        `drop` is called."""
        if self.errors.get(name) != reason:
            log.error("adapter_not_loaded", adapter=name, source=source, reason=reason)
        self.records[name] = new_record(name, source, self._clock())
        self.errors[name] = reason
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._retry(), name="waiting-seeds")

    def drop(self, name: str) -> None:
        """Expect an adapter no longer, because it was applied or given up."""
        self.expected.pop(name, None)
        self.errors.pop(name, None)
        self.records.pop(name, None)

    def expect(self, name: str, source: str) -> None:
        """Note that the configuration wants an adapter from `source`. If it waits for another source, it now waits for
        this one."""
        self.expected[name] = source
        if name in self.records and self.records[name].source != source:
            self.records[name] = new_record(name, source, self._clock())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _retry(self) -> None:
        delay = FIRST_RETRY_SECONDS
        while self.records:
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_RETRY_SECONDS)
            for record in tuple(self.records.values()):
                if self.records.get(record.name) is record:
                    await self._try(record)

    async def _try(self, record: AdapterRecord) -> None:
        try:
            with suppress(ApiError):  # its name is being changed, or was given to another adapter meanwhile
                await self._seed(record.name, record.source)
        except Exception:  # a bug: without a retry, no configured adapter that waits would ever be served
            log.exception("adapter_retry_failed", adapter=record.name, source=record.source)
