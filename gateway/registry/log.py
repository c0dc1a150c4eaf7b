"""Follows and extends a registry's log for one gateway. A change takes effect when it comes back from the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Generic, Protocol

import structlog

from gateway.core.errors import ApiError, Fault, unavailable
from gateway.registry.record import R, RecordChange, RegistrySnapshot
from gateway.registry.store import RecordStore, StoreAway

RECONNECT_SECONDS = 0.5
ECHO_SECONDS = 5.0
"""Seconds that a change may take to come back."""

log = structlog.get_logger("registry")


class Mirror(Protocol[R]):
    """A gateway's copy of a registry, in which changes take effect."""

    @property
    def generation(self) -> int: ...

    @property
    def records(self) -> Mapping[str, R]: ...

    def apply_change(self, change: RecordChange[R]) -> None:
        """Apply the next change of the log."""

    def apply_snapshot(self, snapshot: RegistrySnapshot[R]) -> None:
        """Replace all records by a snapshot of the registry."""

    def put(self, record: R) -> None:
        """Serve a record that is not from the registry."""


class RegistryLog(Generic[R]):
    """Feeds changes of this and other gateways to a mirror, in the order of the log."""

    def __init__(self, store: RecordStore[R], mirror: Mirror[R], noun: str) -> None:
        """`noun` names the kind of record in logs and error messages."""
        self._store = store
        self._mirror = mirror
        self._noun = noun
        self._unseen: dict[str, R] = {}
        """Configured records that are served although the registry was away. They are written to it when it is back."""
        self.next_change = asyncio.Event()
        """Event that is set, and replaced by a new one, whenever something has changed."""
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        """Read the registry and follow it in the background. If it is away, reading it is retried in the background."""
        with suppress(StoreAway):
            await self._read_all()
        self._task = asyncio.create_task(self._follow(), name=f"{self._noun}-log")

    async def close(self) -> None:
        self._closing = True  # redis-py may swallow a cancellation that meets it between two reads
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def put(self, record: R, previous: R | None, *, seed: str = "") -> None:
        """Write a record in place of `previous`. Returns when the change is in effect here.

        Raises:
            ApiError: a conflict; REGISTRY_UNAVAILABLE.
        """
        with writing(self._noun):
            await self._arrival(await self._store.put(record, previous, seed=seed))

    async def remove(self, record: R, drain_seconds: float | None, *, seed: str = "") -> None:
        """Remove a record. Returns when the change is in effect here. Raises ApiError like `put`."""
        with writing(self._noun):
            await self._arrival(await self._store.remove(record, drain_seconds, seed=seed))

    def keep(self, record: R) -> None:
        """Serve a configured record although the registry is away, and write it to the registry when that is back."""
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
            except Exception:  # a bug: without a retry, this gateway would never see a change again
                log.exception("registry_not_followed", registry=self._noun)
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _read_changes(self) -> None:
        changes = await self._store.changes(self._mirror.generation)
        if changes is None or self._unseen:
            await self._read_all()
            return
        for change in changes:
            self._mirror.apply_change(change)
        if changes:
            self._tell()

    async def _read_all(self) -> None:
        """Replace the mirror's records by those of the registry. If the registry was lost, by a flush or a Redis
        without persistence, it is restored from the mirror first."""
        snapshot = await self._store.read()
        if not snapshot.generation and self._mirror.generation:
            await self._store.restore(self._mirror.records.values())
            snapshot = await self._store.read()
        offered = dict(self._unseen)
        for record in offered.values():
            await self._offer(record, snapshot.records.get(record.name))
        if offered:
            snapshot = await self._store.read()
        # Records that were added to `_unseen` meanwhile are offered next time, and served until then.
        self._unseen = {name: record for name, record in self._unseen.items() if offered.get(name) is not record}
        self._mirror.apply_snapshot(snapshot)
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
    """Convert failures of the store into the ApiError (REGISTRY_UNAVAILABLE) that an operator gets."""
    try:
        yield
    except (StoreAway, TimeoutError) as error:
        reason = str(error) or "a change has not come back in time"
        raise unavailable(Fault.REGISTRY_UNAVAILABLE, f"the {noun} registry cannot be changed: {reason}") from error
