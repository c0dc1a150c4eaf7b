"""When each API key was used last, to about a minute, in Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from redis.asyncio import Redis

from gateway.registry.store import StoreAway, answering

WRITE_SECONDS = 60.0
"""Seconds between two writes. Each is one command for all keys that were used since the one before."""


class LastUseStore(Protocol):
    """Where all gateways keep the times. Methods raise StoreAway."""

    async def write(self, times: Mapping[str, int]) -> None:
        """Write times in Unix seconds by the ids of keys."""

    async def read(self, key_ids: Sequence[str]) -> Mapping[str, int]:
        """Return the times of these keys, as far as there are any."""

    async def forget(self, key_ids: Collection[str]) -> None: ...


class RedisLastUse:
    """`LastUseStore` in a hash of Redis."""

    def __init__(self, client: Redis, prefix: str = "loralane:") -> None:
        self._client = client
        self._name = f"{prefix}accounts:{{all}}:used"

    async def write(self, times: Mapping[str, int]) -> None:
        async with answering():
            await self._client.hset(self._name, items=[part for pair in times.items() for part in pair])

    async def read(self, key_ids: Sequence[str]) -> Mapping[str, int]:
        async with answering():
            found: Any = await self._client.hmget(self._name, key_ids)
        return {key_id: int(at) for key_id, at in zip(key_ids, found, strict=True) if at is not None}

    async def forget(self, key_ids: Collection[str]) -> None:
        async with answering():
            await self._client.hdel(self._name, *key_ids)


class LastUse:
    """Notes which keys are used, and writes that every WRITE_SECONDS, so that no request waits for it. Times that
    could not be written are written later."""

    def __init__(self, store: LastUseStore | None = None, clock: Callable[[], float] = time.time) -> None:
        """`store` of None keeps the times in this process alone."""
        self._store = store
        self._clock = clock
        self._used: set[str] = set()
        """Ids of keys that were used since the last write."""
        self._times: dict[str, int] = {}
        """Times that are not written yet or, without a store, all."""
        self._task: asyncio.Task[None] | None = None
        self._is_known: Callable[[str], bool] = lambda key_id: True

    def note(self, key_id: str) -> None:
        self._used.add(key_id)

    def start(self, is_known: Callable[[str], bool]) -> None:
        """Write from now on. `is_known` returns whether there is still a key with an id; others are not written."""
        self._is_known = is_known
        self._task = asyncio.create_task(self._keep_writing(), name="last-use")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            await self.write()

    async def write(self) -> None:
        """Write the times of the keys that were used. While Redis is away, they are kept."""
        self._take()
        if self._store is not None and self._times:
            sent = dict(self._times)
            with suppress(StoreAway):
                await self._store.write(sent)
                self._times = {key_id: at for key_id, at in self._times.items() if sent.get(key_id) != at}

    async def read(self, key_ids: Sequence[str]) -> Mapping[str, int]:
        """Return the time of the last use of each of these keys, in Unix seconds; keys that were never used have none.
        While Redis is away, only what this gateway knows is returned."""
        self._take()
        stored: Mapping[str, int] = {}
        if self._store is not None and key_ids:
            with suppress(StoreAway):
                stored = await self._store.read(key_ids)
        return {**stored, **{key_id: self._times[key_id] for key_id in key_ids if key_id in self._times}}

    async def forget(self, key_ids: Collection[str]) -> None:
        """Forget keys that were deleted."""
        for key_id in key_ids:
            self._used.discard(key_id)
            self._times.pop(key_id, None)
        if self._store is not None and key_ids:
            with suppress(StoreAway):
                await self._store.forget(key_ids)

    def _take(self) -> None:
        """Give the keys that were used their times, and let go those that were deleted: other gateways may have used
        them a moment longer."""
        self._times.update(dict.fromkeys(self._used, int(self._clock())))
        self._used.clear()
        self._times = {key_id: at for key_id, at in self._times.items() if self._is_known(key_id)}

    async def _keep_writing(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await self.write()
