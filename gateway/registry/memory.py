"""A registry's records in the memory of this process, for programs that share them with no other process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Generic

from gateway.registry.record import R, RecordChange, RecordKind, RegistrySnapshot

CHANGES_KEPT = 1000
"""Number of changes that a follower may fall behind by before it must read the whole registry again, as in Redis."""


class MemoryRecordStore(Generic[R]):
    """`RecordStore` in memory. All methods belong to one event loop."""

    def __init__(self, kind: RecordKind[R]) -> None:
        """`kind` encodes the records, and makes the errors of conflicts."""
        self._kind = kind
        self._content: RegistrySnapshot[R] = RegistrySnapshot()
        self._seeds: dict[str, str] = {}
        self._changes: deque[RecordChange[R]] = deque(maxlen=CHANGES_KEPT)
        self._news = asyncio.Event()

    async def read(self) -> RegistrySnapshot[R]:
        return self._content

    async def seed(self, name: str) -> str | None:
        return self._seeds.get(name)

    async def knows(self, name: str) -> bool:
        return any(name in (record.name, *record.aliases) for record in self._content.records.values())

    async def changes(self, after: int, num_records: int = 0, num_aliases: int = 0) -> list[RecordChange[R]] | None:
        while self._content.generation <= after:
            self._news.clear()
            await self._news.wait()
        later = [change for change in self._changes if change.generation > after]
        return later if later[0].generation == after + 1 else None

    async def put(self, record: R, previous: R | None, *, seed: str = "", at: int | None = None) -> int:
        if self._is_applied(record.name, seed):
            return 0
        self._check(record, previous, at)
        taken = {alias: other.name for other in self._content.records.values() for alias in other.aliases}
        for name in (record.name, *record.aliases):
            if taken.get(name, record.name) != record.name or (name != record.name and name in self._content.records):
                raise self._kind.conflict(f"{name} is the name of another {self._kind.noun}")
        return self._write(record.name, record, seed=seed)

    async def remove(self, record: R, drain_seconds: float | None, *, seed: str = "", at: int | None = None) -> int:
        if self._is_applied(record.name, seed):
            return 0
        self._check(record, record if record.generation else None, at)
        return self._write(record.name, None, drain_seconds, seed=seed)

    async def restore(self, records: Iterable[R], generation: int) -> None:
        """Do nothing, because memory is never lost while the process runs."""

    def _is_applied(self, name: str, seed: str) -> bool:
        return seed != "" and self._seeds.get(name) == seed

    def _check(self, record: R, previous: R | None, at: int | None) -> None:
        """Raise the kind's conflict unless the stored record of this name is `previous`, and the registry's generation
        is `at`."""
        stored = self._content.records.get(record.name)
        has_moved = at is not None and at != self._content.generation
        if has_moved or (stored and stored.generation) != (previous and previous.generation):
            raise self._kind.conflict(f"the {self._kind.noun} {record.name!r} was changed meanwhile")

    def _write(self, name: str, record: R | None, drain_seconds: float | None = None, *, seed: str = "") -> int:
        """Store a record, or remove it if it is None, and return the new generation."""
        if seed:
            self._seeds[name] = seed
        generation, records = self._content.generation + 1, dict(self._content.records)
        written = None if record is None else self._kind.decode(self._kind.encode(record), generation)
        records.pop(name, None)
        if written is not None:
            records[name] = written
        num_aliases = len({alias for one in records.values() for alias in one.aliases})
        self._content = RegistrySnapshot(generation, records, num_aliases)
        self._changes.append(RecordChange(generation, name, written, drain_seconds))
        self._news.set()
        return generation
