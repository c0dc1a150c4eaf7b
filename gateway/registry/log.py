"""The registry's log as one gateway follows and extends it: a change binds when it comes back from the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Generic, Protocol

import structlog

from gateway.core.errors import ApiError, Fault, unavailable
from gateway.registry.record import Change, R, Snapshot
from gateway.registry.store import RecordStore, StoreAway

RECONNECT_SECONDS = 0.5
ECHO_SECONDS = 5.0
"""How long a change may take to come back."""

log = structlog.get_logger("registry")


class Mirror(Protocol[R]):
    """One gateway's copy of a registry, where changes take effect."""

    @property
    def generation(self) -> int: ...

    @property
    def records(self) -> Mapping[str, R]: ...

    def take(self, change: Change[R]) -> None:
        """One change, the next in the log."""

    def take_all(self, snapshot: Snapshot[R]) -> None:
        """Whatever the registry holds, in place of whatever was here."""

    def put(self, record: R) -> None:
        """A record that is not from the registry."""


class RegistryLog(Generic[R]):
    """Feeds a mirror, in one order for this gateway's changes and those of others."""

    def __init__(self, store: RecordStore[R], mirror: Mirror[R], noun: str) -> None:
        """`noun`: what the registry is about."""
        self._store = store
        self._mirror = mirror
        self._noun = noun
        self._unseen: dict[str, R] = {}
        """Served because the configuration says so, while the registry could not be asked; it will be."""
        self.next_change = asyncio.Event()
        """Set, and replaced, whenever something has changed."""
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        """Reads the registry and follows it from now on. While it is away, there is nothing to follow."""
        with suppress(StoreAway):
            await self._read_all()
        self._task = asyncio.create_task(self._follow(), name=f"{self._noun}-log")

    async def close(self) -> None:
        self._closing = True  # redis-py may swallow a cancellation that meets it between two reads
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def put(self, record: R, previous: R | None, *, seed: str = "") -> None:
        """Returns when the change binds here.

        Raises:
            ApiError: a conflict; REGISTRY_UNAVAILABLE.
        """
        with writing(self._noun):
            await self._arrival(await self._store.put(record, previous, seed=seed))

    async def remove(self, record: R, drain_seconds: float | None, *, seed: str = "") -> None:
        """Returns when the change binds here. Raises ApiError, as `put`."""
        with writing(self._noun):
            await self._arrival(await self._store.remove(record, drain_seconds, seed=seed))

    def keep(self, record: R) -> None:
        """Serves what is configured without the registry, which is told when it is back."""
        self._unseen[record.name] = record
        self._mirror.put(record)

    async def _arrival(self, generation: int) -> None:
        async with asyncio.timeout(ECHO_SECONDS):
            while self._mirror.generation < generation:
                await self.next_change.wait()

    async def _follow(self) -> None:
        away = False
        while not self._closing:
            try:
                await self._read_all()
                if away:
                    log.info("registry_back", registry=self._noun, generation=self._mirror.generation)
                away = False
                while not self._closing:
                    await self._read_changes()
            except StoreAway as error:
                if not away:
                    log.warning("registry_away", registry=self._noun, reason=str(error))
                away = True
            except Exception:  # a bug: without another try, no change would ever bind here again
                log.exception("registry_not_followed", registry=self._noun)
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _read_changes(self) -> None:
        changes = await self._store.changes(self._mirror.generation)
        if changes is None or self._unseen:
            await self._read_all()
            return
        for change in changes:
            self._mirror.take(change)
        if changes:
            self._tell()

    async def _read_all(self) -> None:
        """A registry that was lost, by a flush or a Redis that keeps nothing, is written back from here."""
        snapshot = await self._store.read()
        if not snapshot.generation and self._mirror.generation:
            await self._store.restore(self._mirror.records.values())
            snapshot = await self._store.read()
        offered = dict(self._unseen)
        for record in offered.values():
            await self._offer(record, snapshot.records.get(record.name))
        if offered:
            snapshot = await self._store.read()
        # What was kept meanwhile is offered next time, and served until then.
        self._unseen = {name: record for name, record in self._unseen.items() if offered.get(name) is not record}
        self._mirror.take_all(snapshot)
        for record in self._unseen.values():
            self._mirror.put(record)
        self._tell()

    async def _offer(self, record: R, previous: R | None) -> None:
        try:
            await self._store.put(record, previous, seed=record.source)
        except ApiError as error:
            log.info("configuration_overruled", registry=self._noun, name=record.name, reason=error.message)

    def _tell(self) -> None:
        self.next_change.set()
        self.next_change = asyncio.Event()


@contextmanager
def writing(noun: str) -> Iterator[None]:
    """What an operator is told while the registry is away."""
    try:
        yield
    except (StoreAway, TimeoutError) as error:
        reason = str(error) or "a change has not come back in time"
        raise unavailable(Fault.REGISTRY_UNAVAILABLE, f"the {noun} registry cannot be changed: {reason}") from error
