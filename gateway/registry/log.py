"""Follows and extends a registry's log for one gateway. A change takes effect when it comes back from the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Generic, Protocol

import structlog

from gateway.core.errors import ApiError, Fault, unavailable
from gateway.registry.record import R, Record, RecordChange, RegistrySnapshot
from gateway.registry.store import RecordStore, StoreAway

RECONNECT_SECONDS = 0.5
ECHO_SECONDS = 5.0
"""Maximum seconds between writing a change and reading it back from the log; then the write fails."""
OTHERS_SECONDS = 3.0
"""Seconds for which a gateway that has missed changes, or has just started, leaves it to others to restore what Redis
has lost. A gateway that follows the registry notices a loss within about a second."""

log = structlog.get_logger("registry")


Seeded = Callable[[R | None, R | None], Awaitable[None]]
"""Called with a record before and after a change that the configuration made; None means that there was or is none."""


async def untold(before: Record | None, after: Record | None) -> None:
    """Do not report a change that the configuration made."""


class Mirror(Protocol[R]):
    """A gateway's in-memory copy of a registry: records by name, and the number (`generation`) of the last change."""

    @property
    def generation(self) -> int: ...

    @property
    def records(self) -> Mapping[str, R]: ...

    def apply_change(self, change: RecordChange[R]) -> None:
        """Apply the next change of the log: put or remove one record, and take over its generation."""

    def apply_snapshot(self, snapshot: RegistrySnapshot[R]) -> None:
        """Replace all records and the generation by those of a snapshot of the registry."""

    def put(self, record: R) -> None:
        """Add or replace a record that the registry does not have, such as a configured one while Redis is away."""


class RegistryLog(Generic[R]):
    """Writes this gateway's changes to the store, and applies all gateways' changes to a mirror in the log's order."""

    def __init__(self, store: RecordStore[R], mirror: Mirror[R], noun: str, seeded: Seeded[R] = untold) -> None:
        """`noun` names the kind of record in log events and error messages, e.g. "adapter"."""
        self._seeded = seeded
        self._store = store
        self._mirror = mirror
        self._noun = noun
        self._seeds: dict[str, str] = {}
        """Seed of each configured record in `_unseen`, by name."""
        self._unseen: dict[str, R] = {}
        """Configured records, by name, that are served while the registry is away and written to it afterwards."""
        self.next_change = asyncio.Event()
        """Event that is set, and replaced by a new one, whenever the mirror was changed or read anew."""
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        """Read the registry into the mirror (if Redis is away, leave it empty) and start a background task that follows
        the registry."""
        with suppress(StoreAway):
            await self._read_all()
        self._task = asyncio.create_task(self._follow(), name=f"{self._noun}-log")

    async def close(self) -> None:
        self._closing = True  # redis-py may swallow a cancellation that meets it between two reads
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def put(self, record: R, previous: R | None, *, seed: str = "", at: int | None = None) -> bool:
        """Write a record in place of `previous` (None: there must be none) and wait until the change is in effect here.
        Return False, having written nothing, if `seed`, the configuration's text for this name, was the last one
        applied to it. Raises ApiError: the record kind's conflict error if the stored record is another, a name or
        alias is taken, or the registry's generation is not `at`; or REGISTRY_UNAVAILABLE if Redis is away, the change
        does not come back within ECHO_SECONDS, or is gone when it does."""
        with writing(self._noun):
            generation = await self._store.put(record, previous, seed=seed, at=at)
            if seed and generation:
                await self._seeded(previous, record)
            await self._arrival(generation)
            kept = self._mirror.records.get(record.name)
            if generation and (kept is None or kept.generation < generation):
                raise StoreAway("the change was lost in a failover of Redis, or undone by another gateway; try again")
            return bool(generation)

    async def remove(self, record: R, drain_seconds: float | None, *, seed: str = "", at: int | None = None) -> None:
        """Remove a record and wait until the change is in effect here. `drain_seconds` and `seed` are stored with the
        change (see `RecordChange`, `RecordStore.seed`). Raises ApiError like `put`."""
        with writing(self._noun):
            generation = await self._store.remove(record, drain_seconds, seed=seed, at=at)
            if seed and generation:
                await self._seeded(record, None)
            await self._arrival(generation)

    def keep(self, record: R, seed: str = "") -> None:
        """Serve a configured record now although the registry is away, and write it to the registry afterwards, with
        the `seed` or, if that is empty, the record's source."""
        self._unseen[record.name] = record
        self._seeds[record.name] = seed or record.source
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
        held = self._held().values()
        changes = await self._store.changes(self._mirror.generation, len(held), count_aliases(held))
        if changes is None or self._unseen:
            await self._read_all()
            return
        for change in changes:
            self._mirror.apply_change(change)
        if changes:
            self._tell()

    async def _read_all(self) -> None:
        """Replace the mirror's records by those of the registry, after writing to it the records that `keep` was given.
        What the registry has lost is first restored from the mirror. Raises StoreAway."""
        snapshot = await self._recovered(await self._store.read())
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

    async def _recovered(self, snapshot: RegistrySnapshot[R]) -> RegistrySnapshot[R]:
        """Write back what Redis has lost, all of it by a flush or without persistence, or some keys by eviction. Return
        the registry as it is then. Raises StoreAway."""
        if snapshot.was_lost and not await self._catch_up(snapshot.generation):
            await asyncio.sleep(OTHERS_SECONDS)
            snapshot = await self._store.read()
        known = snapshot.records
        if not known and (snapshot.was_lost or snapshot.generation in (0, self._mirror.generation)):
            known = self._held()
        is_unwritten = not (snapshot.generation or self._mirror.generation or known)
        if is_unwritten or _is_whole(snapshot, known):
            return snapshot
        lost = len(known) - len(snapshot.records)
        log.warning("registry_restored", registry=self._noun, records=len(known), lost=lost)
        await self._store.restore(known.values(), snapshot.generation)
        return await self._store.read()

    async def _catch_up(self, generation: int) -> bool:
        """Apply the changes up to `generation` to a mirror that has read the registry before. Return False if it has
        not, or if some changes are gone from the store. Raises StoreAway."""
        while 0 < self._mirror.generation < generation:
            changes = await self._store.changes(self._mirror.generation)
            if not changes:
                return False
            for change in changes:
                self._mirror.apply_change(change)
        return self._mirror.generation >= generation

    def _held(self) -> dict[str, R]:
        """Return the records of the mirror that came from the registry, by name."""
        return {name: record for name, record in self._mirror.records.items() if record.generation}

    async def _offer(self, record: R, previous: R | None) -> None:
        try:
            if await self._store.put(record, previous, seed=self._seeds[record.name]):
                await self._seeded(previous, record)
        except ApiError as error:
            log.info("configuration_overruled", registry=self._noun, name=record.name, reason=error.message)

    def _tell(self) -> None:
        self.next_change.set()
        self.next_change = asyncio.Event()


def count_aliases(records: Iterable[Record]) -> int:
    return len({alias for record in records for alias in record.aliases})


def _is_whole(snapshot: RegistrySnapshot[R], known: Mapping[str, R]) -> bool:
    """Return whether a registry that was written has lost nothing. `known` has the records that it should have."""
    has_records = len(snapshot.records) == len(known) and not snapshot.was_lost
    return bool(snapshot.generation) and has_records and snapshot.num_aliases >= count_aliases(known.values())


@contextmanager
def writing(noun: str) -> Iterator[None]:
    """Convert StoreAway and TimeoutError of the body into ApiError (REGISTRY_UNAVAILABLE). `noun` is for its
    message."""
    try:
        yield
    except (StoreAway, TimeoutError) as error:
        reason = str(error) or "a change has not come back in time"
        raise unavailable(Fault.REGISTRY_UNAVAILABLE, f"the {noun} registry cannot be changed: {reason}") from error
