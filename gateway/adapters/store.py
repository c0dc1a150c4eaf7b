"""The adapter registry in Redis or Valkey: one script a change, and a log that every gateway follows.

Keys share one hash tag, hence one slot of a cluster; `*` is the configured prefix followed by `adapters:{base model}:`

    *records     hash    name -> its generation and its record
    *aliases     hash    alias -> name
    *seeds       hash    name -> the source that a configuration named last
    *generation  text    counts changes
    *changes     stream  the last of them, an entry's id is its generation
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.adapters.record import AdapterRecord, Change, Snapshot, decode_record, encode_record
from gateway.core.errors import ApiError, Fault

CALL_SECONDS = 2.0
QUIET_SECONDS = 1.0
"""Without news for so long, a follower makes sure that it has missed none."""
BATCH = 100


class StoreAway(Exception):
    """Redis does not answer, or not in time."""


class AdapterStore(Protocol):
    """What the registry asks of the place it is kept in. Every method raises StoreAway."""

    async def read(self) -> Snapshot: ...

    async def seed(self, name: str) -> str | None:
        """The source that a configuration named last for `name`."""

    async def changes(self, after: int) -> list[Change] | None:
        """What happened after a generation, as soon as anything does; empty after a quiet while.

        None: there is no way to tell, so that everything has to be read anew.
        """

    async def put(self, record: AdapterRecord, previous: AdapterRecord | None, *, seed: str = "") -> int:
        """Writes a record in place of `previous`; returns its generation, 0 if `seed` is no news.

        Raises:
            ApiError: ADAPTER_CONFLICT, somebody else was faster, or a name or alias is taken.
        """

    async def remove(self, record: AdapterRecord, drain_seconds: float | None) -> int:
        """Removes a record with its aliases; returns the generation. Raises ApiError: ADAPTER_CONFLICT."""

    async def restore(self, records: Iterable[AdapterRecord]) -> None:
        """Writes a lost registry back; does nothing where there is one."""


class RedisAdapterStore:
    """An `AdapterStore` shared by every gateway of one base model."""

    def __init__(self, client: Redis, base: str, prefix: str = "loralane:") -> None:
        """`base`: the model all these adapters are made for."""
        self._client = client
        names = ("records", "aliases", "seeds", "generation", "changes")
        keys = {name: f"{prefix}adapters:{{{base}}}:{name}" for name in names}
        self._records, self._aliases, self._seeds, self._generation, self._changes = keys.values()
        self._change = client.register_script(_script("change.lua"))
        self._restore = client.register_script(_script("restore.lua"))

    async def read(self) -> Snapshot:
        async with _answering(), self._client.pipeline(transaction=True) as pipe:
            pipe.get(self._generation)
            pipe.hgetall(self._records)
            generation, values = await pipe.execute()
        records = map(_decode, values.values())
        return Snapshot(int(generation or 0), {record.name: record for record in records})

    async def seed(self, name: str) -> str | None:
        async with _answering():
            seed: Any = await self._client.hget(self._seeds, name)
        return None if seed is None else seed.decode()

    async def changes(self, after: int) -> list[Change] | None:
        async with _answering(QUIET_SECONDS):
            block = int(QUIET_SECONDS * 1000)
            reply: Any = await self._client.xread({self._changes: f"{after}-0"}, BATCH, block)
            if not reply:
                return [] if int(await self._client.get(self._generation) or 0) == after else None
        [(_, entries)] = reply
        changes = [_change(entry_id, fields) for entry_id, fields in entries]
        return changes if changes[0].generation == after + 1 else None

    async def put(self, record: AdapterRecord, previous: AdapterRecord | None, *, seed: str = "") -> int:
        return await self._write(record, previous, encode_record(record), record.aliases, seed=seed)

    async def remove(self, record: AdapterRecord, drain_seconds: float | None) -> int:
        return await self._write(record, record, b"", (), drain="" if drain_seconds is None else repr(drain_seconds))

    async def restore(self, records: Iterable[AdapterRecord]) -> None:
        keys = [self._records, self._aliases, self._generation, self._changes]
        args: list[str | int | bytes] = []
        for record in records:
            args += [record.name, encode_record(record), len(record.aliases), *record.aliases]
        async with _answering():
            await self._restore(keys, args)

    async def _write(
        self,
        record: AdapterRecord,
        previous: AdapterRecord | None,
        text: bytes,
        aliases: tuple[str, ...],
        *,
        drain: str = "",
        seed: str = "",
    ) -> int:
        keys = [self._records, self._aliases, self._seeds, self._generation, self._changes]
        expected, present = ("", ()) if previous is None else (previous.generation, previous.aliases)
        args = [record.name, expected, text, drain, seed, len(present), *present, *aliases]
        async with _answering():
            outcome, detail = await self._change(keys, args)
        if outcome == b"conflict":
            raise conflict(f"the adapter {record.name!r} was changed by another gateway meanwhile")
        if outcome == b"taken":
            raise conflict(detail.decode())
        return int(detail or 0)


def conflict(message: str) -> ApiError:
    return ApiError(Fault.ADAPTER_CONFLICT, message, "lora_name")


@asynccontextmanager
async def _answering(patience: float = 0.0) -> AsyncGenerator[None, None]:
    """`patience`: seconds more than a call may take otherwise."""
    try:
        async with asyncio.timeout(CALL_SECONDS + patience):
            yield
    except (RedisError, OSError) as error:
        raise StoreAway(f"Redis: {error}" if str(error) else "Redis does not answer") from error


def _script(name: str) -> str:
    return (resources.files("gateway.adapters") / name).read_text(encoding="utf-8")


def _decode(value: bytes) -> AdapterRecord:
    generation, _, text = value.partition(b" ")
    return decode_record(text, int(generation))


def _change(entry_id: bytes, fields: dict[bytes, Any]) -> Change:
    generation = int(entry_id.partition(b"-")[0])
    record = decode_record(fields[b"record"], generation) if fields[b"record"] else None
    drain = float(fields[b"drain"]) if fields[b"drain"] else None
    return Change(generation, fields[b"name"].decode(), record, drain)
