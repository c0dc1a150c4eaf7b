"""Batches shared by every gateway, in Redis or Valkey: one script a change, and the time is Redis's.

Keys of one tenant share the hash tag {tenant}; `*` is the configured prefix:

    *batch:{tenant}:ID         hash   what was asked for, status, times and counts; `fence` of the last lease; fences of
                                      processes that may have died of a task or a line: `lost:TASK`, `mark:POSITION`
    *batchwork:{tenant}:ID     zset   its open tasks, by when their leases run out in milliseconds; 0: nobody's
    *batchholders:{tenant}:ID  hash   task -> fence and owner of its lease
    *batchbits:{tenant}:ID     text   one bit a position: an answer to it is committed
    *batchparts:{tenant}:ID    set    names of the objects that hold committed answers
    *batches:{tenant}          zset   ids of all batches of the tenant, by when they were created
    *batchesopen:{tenant}      set    ids of those that have not ended
    *webhooks:{tenant}         zset   ends of batches that the tenant is yet to be told (`gateway.batches.webhooks`)
    *batchindex:{batches}      zset   TENANT/ID of whatever may have a task, by when its window is over
    *batchnewest:{batches}     zset   TENANT/ID of the newest MAX_NEWEST batches of all tenants, by creation

The index is a hint that leads to batches: it may name some that are over, and is never without one that is not.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import groupby
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from gateway.batches.lease import ALL_TASKS, SHARD_SIZE, Lease, Standing, TaskKind, read_lease
from gateway.batches.record import COUNTS, Batch, BatchError, NewBatch, Tally, batch_not_found, new_fields, read_fields
from gateway.batches.trial import Suspicion
from gateway.batches.turns import Candidate, Turns, candidates_of, entry_of
from gateway.core.errors import ApiError, Fault, invalid_request, unavailable
from gateway.limiter.calls import Argument, RedisCalls, Script, StoreError

PACKAGE = "gateway.batches"
SCRIPTS = (
    *("create", "cancel", "enter", "look", "claim", "begin", "renew", "commit", "release"),
    *("validated", "invalid", "finished", "swept"),
)
OF_TENANT = frozenset(("batches", "batchesopen", "webhooks"))
"""Kinds of keys that a tenant has one of."""
PAGE = 256
"""Entries of the index read at a time."""
MAX_NEWEST = 1000
"""Batches of all tenants together that an operator may look back at."""
TOGETHER = 32
"""Batches of one tenant looked at in one call."""


class BatchStore:
    """Every method raises ApiError REGISTRY_UNAVAILABLE while Redis is away: nothing is known to have happened then."""

    def __init__(
        self,
        client: Redis | RedisCluster,
        *,
        lease_seconds: float = 15.0,
        retention_seconds: float = 30 * 86_400.0,
        timeout: float = 5.0,
        prefix: str = "loralane:",
        told: Collection[str] = (),
    ) -> None:
        """`timeout`: seconds of one call. `retention_seconds`: how long a batch is remembered after its end. `told`:
        tenants that have an outbox for such ends."""
        self._told = frozenset(told)
        self._calls = RedisCalls.patient(client, prefix, timeout)
        self._lease_ms = int(lease_seconds * 1000)
        self._retention_ms = int(retention_seconds * 1000)
        self._index = self._calls.key("batchindex", "batches")
        self._newest = self._calls.key("batchnewest", "batches")
        self._turns = Turns()
        self._scripts = {name: Script.load("job.lua", f"{name}.lua", package=PACKAGE) for name in SCRIPTS}

    async def create(self, batch: NewBatch, max_open: int) -> Batch:
        """Doing it twice makes one. Raises ApiError: INSUFFICIENT_QUOTA, `max_open` of the tenant have not ended."""
        entry = entry_of(batch.tenant, batch.id)
        await self._run("enter", [self._index], [entry, batch.window_s])
        keys = self._keys(batch.tenant, batch.id, "batch", "batchwork", "batches", "batchesopen")
        words = await self._run("create", keys, [batch.id, max_open, batch.window_s, *new_fields(batch)])
        if not words:
            await self._leave_index([entry])
            message = f"tenant {batch.tenant} may have {max_open} batches open at once; wait until one has ended"
            raise ApiError(Fault.INSUFFICIENT_QUOTA, message)
        async with self._client() as client:  # afterwards: a refused batch pushes none out
            pipeline = client.pipeline(transaction=False).zadd(self._newest, {entry: _batch(words).created_at})
            await pipeline.zremrangebyrank(self._newest, 0, -1 - MAX_NEWEST).execute()
        return _batch(words)

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """Raises ApiError: BATCH_NOT_FOUND."""
        [words] = await self._read(tenant, [batch_id])
        if not words:
            raise batch_not_found(batch_id)
        return read_fields(words)

    async def list(self, tenant: str, after: str | None = None, limit: int = 20) -> tuple[Sequence[Batch], bool]:
        """The newest first, and whether there are more. Raises ApiError: INVALID_REQUEST, `after` is no batch."""
        [everything] = self._keys(tenant, "", "batches")
        while True:
            async with self._client() as client:
                rank = -1 if after is None else await client.zrevrank(everything, after)
                if rank is None:
                    raise invalid_request("after is no batch of yours", "after")
                found = await client.zrevrange(everything, rank + 1, rank + 1 + limit)
            ids = [batch_id.decode() for batch_id in found]
            pages = await self._read(tenant, ids)
            forgotten = [batch_id for batch_id, words in zip(ids, pages, strict=True) if not words]
            if not forgotten:
                return [read_fields(words) for words in pages[:limit]], len(ids) > limit
            async with self._client() as client:
                await client.zrem(everything, *forgotten)

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Doing it twice is the same. Raises ApiError: BATCH_NOT_FOUND; BATCH_CONFLICT, no line is left to cancel."""
        words = await self._run("cancel", self._keys(tenant, batch_id, "batch"), [])
        if not words:
            raise batch_not_found(batch_id)
        batch = _batch(words)
        if batch.status not in ("cancelling", "cancelled"):
            raise ApiError(Fault.BATCH_CONFLICT, f"{batch_id} is {batch.status}: there is nothing left to cancel")
        return batch

    async def claim(
        self, owner: str, want: Collection[TaskKind] = ALL_TASKS, skip: Collection[str] = ()
    ) -> Lease | None:
        """A task that is nobody's, or whose lease has run out, of the most urgent batch that has one.

        `skip`: ids of batches that are passed over.

        Batches are equally urgent while the time they have left is the same to a factor of two; their tenants take
        turns, and each one's earliest deadline goes first.
        """
        first, more = 0, True
        while more:
            now, found = await self._run("look", [self._index], [first, first + PAGE - 1])
            candidates = candidates_of(found)
            wanted = [one for one in candidates if one.id not in skip]
            for tenant, group in groupby(self._turns.order(wanted, int(now) / 1e6), lambda one: one.tenant):
                batches = list(group)
                for start in range(0, len(batches), TOGETHER):
                    lease = await self._claim(owner, want, tenant, batches[start : start + TOGETHER], int(now) / 1e6)
                    if lease is not None:
                        self._turns.took(tenant)
                        return lease
            first, more = first + PAGE, len(candidates) == PAGE
        return None

    async def renew(self, leases: Sequence[Lease]) -> dict[Lease, Standing]:
        """Extends each by a term, unless it is `ending`."""
        calls = [self._of(lease, "renew", ("batchwork", "batchholders"), [self._lease_ms]) for lease in leases]
        return {lease: word.decode() for lease, word in zip(leases, await asyncio.gather(*calls), strict=True)}

    async def commit(self, lease: Lease, parts: Sequence[str], positions: Sequence[int], tally: Tally) -> bool:
        """Answers to `positions` count from now on, all or none: they lie in the objects named.

        Doing it twice with the same parts is the same. False: the lease is lost, and nothing has happened.

        Raises:
            ValueError: a position is none of the shard, or was committed before; nothing has happened.
        """
        counts = [word for name in COUNTS for word in (name, getattr(tally, name))]
        args: list[Argument] = [len(parts), *parts, len(positions), *positions, *counts]
        committed = await self._of(lease, "commit", ("batchholders", "batchbits", "batchparts"), args)
        if committed < 0:
            raise ValueError(f"some of {positions} in {parts} are not {lease.batch_id}'s to commit")
        return bool(committed)

    async def release(self, lease: Lease, retry_after: float = 0.0) -> None:
        """Hands a task back, for others after `retry_after` seconds; a shard whose positions are all done is over. A
        lease that is lost is not counted as that of a process that died."""
        await self._of(lease, "release", ("batchwork", "batchholders", "batchbits"), [int(retry_after * 1000)])

    async def begin_trial(self, lease: Lease, position: int | None = None) -> Suspicion | None:
        """Mark a line, or the task itself where `position` is None. None: the lease is lost, and nothing is marked."""
        found = await self._mark(lease, position, "begin")
        return Suspicion(*found) if found else None

    async def end_trial(self, lease: Lease, position: int | None = None) -> None:
        """Take a mark back: this process outlived the line, or the task itself where `position` is None."""
        await self._mark(lease, position, "end")

    async def keep_mark(self, lease: Lease, position: int | None = None) -> None:
        """Keep a mark for good, although this process lives."""
        await self._mark(lease, position, "keep", secrets.token_hex(4))

    async def validated(self, lease: Lease, total: int, model: str | None = None) -> bool:
        """`total` lines are ready to run. False: the lease is lost. A batch that is ending has no lines to run."""
        args: list[Argument] = [total, SHARD_SIZE, model or ""]
        return bool(await self._of(lease, "validated", ("batchwork", "batchholders"), args))

    async def invalid(self, lease: Lease, errors: Sequence[BatchError]) -> bool:
        """End the batch as failed, or as cancelled if no line of it is left to run. False: the lease is lost."""
        return bool(await self._of(lease, "invalid", self._ending(lease), [msgspec.json.encode(errors)]))

    async def parts(self, lease: Lease) -> Sequence[str]:
        """Names of all objects that hold committed answers, in order."""
        [key] = self._keys(lease.tenant, lease.batch_id, "batchparts")
        async with self._client() as client:
            return sorted(name.decode() for name in await client.smembers(key))

    async def finished(self, lease: Lease, output_file_id: str | None, error_file_id: str | None) -> bool:
        """The batch has ended as its outcome says. False: the lease is lost."""
        args: list[Argument] = [output_file_id or "", error_file_id or ""]
        return bool(await self._of(lease, "finished", self._ending(lease), args))

    async def open(self, most: int) -> tuple[float, Sequence[Batch]]:
        """Redis's time in Unix seconds, and batches of all tenants, that something is left to do for: those whose
        windows are over first."""
        now, found = await self._run("look", [self._index], [0, most - 1])
        return int(now) / 1e6, await self._batches([(one.tenant, one.id) for one in candidates_of(found)])

    async def newest(self, most: int) -> Sequence[Batch]:
        """Return the newest batches of all tenants, the newest first. Batches that are forgotten are left out."""
        async with self._client() as client:
            found = await client.zrevrange(self._newest, 0, most - 1)
        batches = await self._batches(tuple(entry.decode().split("/")) for entry in found)
        return sorted(batches, key=lambda batch: batch.created_at, reverse=True)

    async def count(self) -> int:
        """Batches, of all tenants, that something is left to do for."""
        async with self._client() as client:
            return int(await client.zcard(self._index))

    async def open_ids(self) -> frozenset[str]:
        """Of batches, of all tenants, that something may be left to do for."""
        async with self._client() as client:
            return frozenset(entry.decode().partition("/")[2] for entry in await client.zrange(self._index, 0, -1))

    async def swept(self, lease: Lease) -> bool:
        """Nothing is left of the batch but what is remembered of it for a while. False: the lease is lost."""
        kinds = ("batchwork", "batchholders", "batchbits", "batchparts")
        if not await self._of(lease, "swept", kinds, [self._retention_ms]):
            return False
        await self._leave_index([entry_of(lease.tenant, lease.batch_id)])
        return True

    async def _claim(
        self, owner: str, want: Collection[TaskKind], tenant: str, batches: Sequence[Candidate], now: float
    ) -> Lease | None:
        """Of some batches of one tenant, in this order. Entries of the index that lead nowhere leave it."""
        kinds = ("batch", "batchwork", "batchholders", "batchbits")
        keys = [key for one in batches for key in self._keys(tenant, one.id, *kinds)]
        words, *found = await self._run("claim", keys, [self._lease_ms, owner, " ".join(want)])
        gone = [one for word, one in zip(words, batches, strict=False) if one.is_over(word, now)]
        if gone:
            await self._leave_index([entry_of(one.tenant, one.id) for one in gone])
        return read_lease(words[-1].decode(), *found) if found else None

    async def _leave_index(self, entries: Sequence[str]) -> None:
        async with self._client() as client:
            await client.zrem(self._index, *entries)

    async def _batches(self, places: Iterable[tuple[str, str]]) -> Sequence[Batch]:
        """Return batches by tenant and id, in no order; those that do not exist are left out."""
        groups = groupby(sorted(places), lambda place: place[0])
        calls = [self._read(tenant, [place[1] for place in group]) for tenant, group in groups]
        return [read_fields(words) for page in await asyncio.gather(*calls) for words in page if words]

    async def _read(self, tenant: str, ids: Sequence[str]) -> Sequence[Mapping[bytes, bytes]]:
        """Fields of batches; none where there is no such batch."""
        async with self._client() as client:
            pipeline = client.pipeline(transaction=False)
            for key in (self._keys(tenant, batch_id, "batch")[0] for batch_id in ids):
                pipeline.hgetall(key)
            return await pipeline.execute()

    def _ending(self, lease: Lease) -> tuple[str, ...]:
        """Kinds of keys that are touched when a batch ends."""
        kinds = ("batchwork", "batchholders", "batchesopen")
        return (*kinds, "webhooks") if lease.tenant in self._told else kinds

    async def _mark(self, lease: Lease, position: int | None, *how: str) -> Any:
        return await self._of(lease, "begin", ("batchholders",), [lease.member if position is None else position, *how])

    async def _of(self, lease: Lease, script: str, kinds: Sequence[str], args: Sequence[Argument]) -> Any:
        """A script about one lease."""
        keys = self._keys(lease.tenant, lease.batch_id, "batch", *kinds)
        return await self._run(script, keys, [lease.member, str(lease.fence), *args])

    async def _run(self, script: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        with _answering():
            return await self._calls.run(self._scripts[script], keys, args)

    @asynccontextmanager
    async def _client(self) -> AsyncGenerator[Any, None]:
        with _answering():
            async with self._calls.guard() as client:
                yield client

    def _keys(self, tenant: str, batch_id: str, *kinds: str) -> Sequence[str]:
        return [self._calls.key(kind, tenant, "" if kind in OF_TENANT else batch_id) for kind in kinds]


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise unavailable(Fault.REGISTRY_UNAVAILABLE, "batches cannot be reached while Redis is away") from error


def _batch(words: Sequence[bytes]) -> Batch:
    """Of fields, each followed by its value."""
    return read_fields(dict(zip(words[::2], words[1::2], strict=True)))
