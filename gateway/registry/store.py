"""Registry in Redis or Valkey. Each change is one script, and every gateway follows a log of the changes.

All keys share one hash tag, hence one slot of a cluster; `*` is the configured prefix followed by the registry's own

    *records     hash    name -> its generation and its record
    *aliases     hash    alias -> name
    *seeds       hash    name -> the source that a configuration named last
    *generation  text    number of the last change
    *changes     stream  the last changes; the id of an entry is its generation
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, Generic, Protocol

import msgspec
import structlog
from redis.asyncio import Redis

from gateway.redis.client import FAILURES
from gateway.redis.states import answer_of
from gateway.registry.record import R, RecordChange, RecordKind, RegistrySnapshot

CALL_SECONDS = 2.0
QUIET_SECONDS = 1.0
"""Seconds without changes after which `changes` returns, having checked that none was missed."""
BATCH = 100

log = structlog.get_logger("registry")


class StoreAway(Exception):
    """Redis failed or did not answer in time."""


class RecordStore(Protocol[R]):
    """Storage of a registry that all gateways share. Every method raises StoreAway. `read` returns all records."""

    async def read(self) -> RegistrySnapshot[R]: ...

    async def seed(self, name: str) -> str | None:
        """Return the seed that `put` or `remove` last stored for `name`: the configuration text (`Record.source`) that
        was applied last. None means that there is none."""

    async def knows(self, name: str) -> bool:
        """Return whether there is a record or an alias of this name."""

    async def changes(self, after: int, num_records: int = 0, num_aliases: int = 0) -> list[RecordChange[R]] | None:
        """Return the first changes (at most 100) after generation `after`, or an empty list if none comes in about a
        second. None means that the whole registry must be read again: changes may be missing, or there are fewer
        records or aliases than the caller knows, so that some were lost."""

    async def put(self, record: R, previous: R | None, *, seed: str = "", at: int | None = None) -> int:
        """Write a record in place of `previous`; None means that there must be no record of this name. Return the new
        generation, or 0, writing nothing, if the non-empty `seed` was the last one applied to this name.

        Raises ApiError on a conflict: the stored record is not `previous`, a name or alias is taken, or the registry's
        generation is no longer `at`, for a change that depends on other records, too.
        """

    async def remove(self, record: R, drain_seconds: float | None, *, seed: str = "", at: int | None = None) -> int:
        """Remove a record with its aliases, and remember `seed` for its name. `drain_seconds` goes to all followers
        (see `RecordChange`). If the record's generation is 0, there must be no record of its name, and only `seed` is
        remembered. Return the new generation, or 0, changing nothing, if the non-empty `seed` was the last one applied.
        Raises ApiError if the stored record is no longer this one, or the registry's generation is no longer `at`."""

    async def restore(self, records: Iterable[R], generation: int) -> None:
        """Write back those of `records` that the registry lacks, under a new generation. Does nothing if its generation
        is no longer `generation`. If there are neither `records` nor any in the registry, forget all seeds."""


class RedisRecordStore(Generic[R]):
    """`RecordStore` in Redis, shared by all gateways. Each change runs one Lua script."""

    def __init__(self, client: Redis, space: str, kind: RecordKind[R]) -> None:
        """`space` is the prefix of all keys, with a hash tag; `kind` encodes the records."""
        self._client = client
        self._kind = kind
        names = ("records", "aliases", "seeds", "generation", "changes")
        keys = {name: f"{space}{name}" for name in names}
        self._records, self._aliases, self._seeds, self._generation, self._changes = keys.values()
        self._change = client.register_script(_script("change.lua"))
        self._restore = client.register_script(_script("restore.lua"))

    async def read(self) -> RegistrySnapshot[R]:
        async with answering(), self._client.pipeline(transaction=True) as pipe:
            pipe.get(self._generation)
            pipe.hgetall(self._records)
            pipe.hlen(self._aliases)
            pipe.xrevrange(self._changes, count=1)
            generation, values, num_aliases, last = await pipe.execute()
        found = (self._decoded(name, value) for name, value in values.items())
        records = {record.name: record for record in found if record is not None}
        was_lost = bool(generation) and not values and _left_records(last)
        return RegistrySnapshot(int(generation or 0), records, num_aliases, was_lost)

    async def seed(self, name: str) -> str | None:
        async with answering():
            seed: Any = await self._client.hget(self._seeds, name)
        return None if seed is None else seed.decode()

    async def knows(self, name: str) -> bool:
        async with answering(), self._client.pipeline(transaction=True) as pipe:
            pipe.hexists(self._records, name)
            pipe.hexists(self._aliases, name)
            return any(await pipe.execute())

    async def changes(self, after: int, num_records: int = 0, num_aliases: int = 0) -> list[RecordChange[R]] | None:
        async with answering(QUIET_SECONDS):
            block = int(QUIET_SECONDS * 1000)
            reply: Any = await self._client.xread({self._changes: f"{after}-0"}, BATCH, block)
            if not reply:
                return [] if await self._is_whole(after, num_records, num_aliases) else None
        [(_, entries)] = reply
        changes = [self._as_change(entry_id, fields) for entry_id, fields in entries]
        return changes if changes[0].generation == after + 1 else None

    async def put(self, record: R, previous: R | None, *, seed: str = "", at: int | None = None) -> int:
        return await self._write(record, previous, self._kind.encode(record), record.aliases, seed=seed, at=at)

    async def remove(self, record: R, drain_seconds: float | None, *, seed: str = "", at: int | None = None) -> int:
        drain = "" if drain_seconds is None else repr(drain_seconds)
        previous = record if record.generation else None
        return await self._write(record, previous, b"", (), drain=drain, seed=seed, at=at)

    async def restore(self, records: Iterable[R], generation: int) -> None:
        keys = [self._records, self._aliases, self._seeds, self._generation, self._changes]
        args: list[str | int | bytes] = [generation]
        for record in records:
            args += [record.name, self._kind.encode(record), len(record.aliases), *record.aliases]
        async with answering():
            await self._restore(keys, args)

    async def _is_whole(self, generation: int, num_records: int, num_aliases: int) -> bool:
        """Return whether the registry still has this generation, and at least as many records and aliases."""
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.get(self._generation)
            pipe.hlen(self._records)
            pipe.hlen(self._aliases)
            stored, records, aliases = await pipe.execute()
        return int(stored or 0) == generation and records >= num_records and aliases >= num_aliases

    async def _write(
        self,
        record: R,
        previous: R | None,
        text: bytes,
        aliases: tuple[str, ...],
        *,
        drain: str = "",
        seed: str = "",
        at: int | None = None,
    ) -> int:
        keys = [self._records, self._aliases, self._seeds, self._generation, self._changes]
        expected, present = ("", ()) if previous is None else (previous.generation, previous.aliases)
        whole = "" if at is None else at
        args = [record.name, expected, text, drain, seed, whole, len(present), *present, *aliases]
        async with answering():
            outcome, detail = await self._change(keys, args)
        if outcome == b"conflict":
            raise self._kind.conflict(f"the {self._kind.noun} {record.name!r} was changed by another gateway meanwhile")
        if outcome == b"taken":
            raise self._kind.conflict(detail.decode())
        return int(detail or 0)

    def _decoded(self, name: bytes, value: bytes) -> R | None:
        """Decode a record's stored `value` ("GENERATION TEXT"). Log an error and return None if it is unreadable, so
        that others are served."""
        generation, _, text = value.partition(b" ")
        try:
            return self._kind.decode(text, int(generation))
        except (ValueError, msgspec.MsgspecError) as error:
            log.error("registry_record_unreadable", registry=self._kind.noun, name=name.decode(), error=str(error))
            return None

    def _as_change(self, entry_id: bytes, fields: dict[bytes, Any]) -> RecordChange[R]:
        generation = int(entry_id.partition(b"-")[0])
        record = self._kind.decode(fields[b"record"], generation) if fields[b"record"] else None
        drain = float(fields[b"drain"]) if fields[b"drain"] else None
        return RecordChange(generation, fields[b"name"].decode(), record, drain)


def _left_records(last: list[tuple[bytes, dict[bytes, bytes]]]) -> bool:
    """Return whether the last entry of the changes says that it left records. True if Redis has lost the changes, too.
    Entries of older gateways say only whether they wrote one."""
    if not last:
        return True
    _, fields = last[0]
    return fields.get(b"left", fields[b"record"]) not in (b"", b"0")


@asynccontextmanager
async def answering(patience: float = 0.0) -> AsyncGenerator[None, None]:
    """Limit the body to CALL_SECONDS plus `patience` seconds. Raises StoreAway for a timeout and for errors of
    Redis."""
    try:
        async with asyncio.timeout(CALL_SECONDS + patience):
            yield
    except FAILURES as error:
        said = answer_of(error) or str(error)
        raise StoreAway(f"Redis: {said}" if said else "Redis does not answer") from error


def _script(name: str) -> str:
    return (resources.files("gateway.registry") / name).read_text(encoding="utf-8")
