"""Batches in Redis or Valkey, shared by all gateways. Each change is one script, and all times are of Redis's clock.

Keys of one tenant share the hash tag {tenant}; `*` is the configured prefix:

    *batch:{tenant}:ID         hash   the request, status, times and counts; `fence` of the last lease; fences of
                                      processes that may have died of a task or a line: `lost:TASK`, `mark:POSITION`
    *batchwork:{tenant}:ID     zset   its open tasks, scored by the end of their leases in milliseconds; 0 means that
                                      no process has the task
    *batchholders:{tenant}:ID  hash   task -> fence and owner of its lease
    *batchbits:{tenant}:ID     text   one bit per position, set if an answer to it is committed
    *batchparts:{tenant}:ID    set    names of the objects that hold committed answers
    *batches:{tenant}          zset   ids of all batches of the tenant, scored by creation time
    *batchesopen:{tenant}      set    ids of the batches that have not ended
    *webhooks:{tenant}         zset   ends of batches of which the tenant must be notified (`gateway.batches.webhooks`)
    *batchindex:{batches}      zset   TENANT/ID of all batches that may have a task, scored by the end of their window
    *batchnewest:{batches}     zset   TENANT/ID of the newest MAX_NEWEST batches of all tenants, scored by creation time

A commit also writes to the keys of the limiter that hold usage and its limits (`gateway.limiter.redis`), which have the
same hash tag.

The index is a hint for finding batches: it contains every batch that has work left, and may contain some that have
none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import groupby
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from gateway.batches.record import Batch, NewBatch, batch_not_found, new_fields, read_fields
from gateway.batches.tenant_turns import index_entry, parse_candidates
from gateway.core.errors import ApiError, Fault, invalid_request, unavailable
from gateway.redis.client import Argument, RedisCalls, Script, StoreError

PACKAGE = "gateway.batches"
SCRIPTS = (
    *("create", "cancel", "enter", "look", "claim", "begin", "renew", "commit", "release"),
    *("validated", "invalid", "finished", "swept"),
)
OF_TENANT = frozenset(("batches", "batchesopen", "webhooks"))
"""Kinds of keys that exist once per tenant. Those of other kinds exist once per batch."""
PAGE = 256
"""Number of index entries that `claim` reads at a time, and of batches that `list` reads where records expired."""
MAX_NEWEST = 1000
"""Number of newest batches, over all tenants, that an operator can list."""


class BatchCatalog:
    """Creates, lists and cancels batches in Redis. Every method raises ApiError (REGISTRY_UNAVAILABLE) while Redis is
    away; it is then unknown whether the change happened."""

    def __init__(self, client: Redis | RedisCluster, prefix: str, timeout: float) -> None:
        """`prefix` begins all keys. A call may take `timeout` seconds."""
        self._calls = RedisCalls.without_breaker(client, prefix, timeout)
        self._index = self._calls.key("batchindex", "batches")
        self._newest = self._calls.key("batchnewest", "batches")
        self._scripts = {name: Script.load("job.lua", f"{name}.lua", package=PACKAGE) for name in SCRIPTS}

    async def create(self, batch: NewBatch, max_open: int) -> Batch:
        """Create a batch and its `validate` task, and return the batch; repeating the call changes nothing. Raises
        ApiError: INVALID_REQUEST (window); INSUFFICIENT_QUOTA if `max_open` of the tenant's batches have not ended."""
        entry = index_entry(batch.tenant, batch.id)
        await self._run("enter", [self._index], [entry, batch.window_s])
        keys = self._keys(batch.tenant, batch.id, "batch", "batchwork", "batches", "batchesopen")
        words = await self._run("create", keys, [batch.id, max_open, batch.window_s, *new_fields(batch)])
        if not words:
            await self._leave_index([entry])
            message = f"tenant {batch.tenant} may have {max_open} batches open at once; wait until one has ended"
            raise ApiError(Fault.INSUFFICIENT_QUOTA, message)
        async with self._client() as client:  # last, so that a refused batch displaces none
            pipeline = client.pipeline(transaction=False).zadd(self._newest, {entry: _batch(words).created_at})
            await pipeline.zremrangebyrank(self._newest, 0, -1 - MAX_NEWEST).execute()
        return _batch(words)

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """Return a tenant's batch. Raises ApiError: BATCH_NOT_FOUND."""
        [words] = await self._read(tenant, [batch_id])
        if not words:
            raise batch_not_found(batch_id)
        return read_fields(words)

    async def list(self, tenant: str, after: str | None = None, limit: int = 20) -> tuple[Sequence[Batch], bool]:
        """Return at most `limit` of a tenant's batches that follow `after` (None: from the newest), newest first, and
        whether there are more. Raises ApiError (INVALID_REQUEST) if `after` is not a batch of the tenant."""
        [everything], count = self._keys(tenant, "", "batches"), limit + 1
        while True:
            async with self._client() as client:
                rank = -1 if after is None else await client.zrevrank(everything, after)
                if rank is None:
                    raise invalid_request("after is no batch of yours", "after")
                entries = await client.zrevrange(everything, rank + 1, rank + count)
            ids = [batch_id.decode() for batch_id in entries]
            pages = await self._read(tenant, ids)
            forgotten = [batch_id for batch_id, words in zip(ids, pages, strict=True) if not words]
            if not forgotten:
                return [read_fields(words) for words in pages[:limit]], len(ids) > limit
            async with self._client() as client:
                await client.zrem(everything, *forgotten)
            count = max(count, min(2 * count, PAGE))  # so that thousands of expired records take few rounds

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Give a batch the status "cancelling" and return it; repeating changes nothing. Its lines stop at the next
        renewal of leases. Raises ApiError: BATCH_NOT_FOUND; BATCH_CONFLICT if it is finalizing or ended otherwise."""
        words = await self._run("cancel", self._keys(tenant, batch_id, "batch"), [])
        if not words:
            raise batch_not_found(batch_id)
        batch = _batch(words)
        if batch.status not in ("cancelling", "cancelled"):
            raise ApiError(Fault.BATCH_CONFLICT, f"{batch_id} is {batch.status}: there is nothing left to cancel")
        return batch

    async def open(self, most: int) -> tuple[float, Sequence[Batch]]:
        """Return Redis's time in Unix seconds and, in no order, the up to `most` batches with the earliest deadlines
        that may have work left."""
        now, entries = await self._run("look", [self._index], [0, most - 1])
        return int(now) / 1e6, await self._batches(
            [(candidate.tenant, candidate.id) for candidate in parse_candidates(entries)]
        )

    async def newest(self, most: int) -> Sequence[Batch]:
        """Return up to `most` of the newest batches of all tenants, newest first, without those whose record has
        expired."""
        async with self._client() as client:
            entries = await client.zrevrange(self._newest, 0, most - 1)
        batches = await self._batches(tuple(entry.decode().split("/")) for entry in entries)
        return sorted(batches, key=lambda batch: batch.created_at, reverse=True)

    async def count(self) -> int:
        """Return the number of batches, of all tenants, that may have work left."""
        async with self._client() as client:
            return int(await client.zcard(self._index))

    async def open_ids(self) -> frozenset[str]:
        """Return the ids of the batches, of all tenants, that may have work left."""
        async with self._client() as client:
            return frozenset(entry.decode().partition("/")[2] for entry in await client.zrange(self._index, 0, -1))

    async def _leave_index(self, entries: Sequence[str]) -> None:
        async with self._client() as client:
            await client.zrem(self._index, *entries)

    async def _batches(self, places: Iterable[tuple[str, str]]) -> Sequence[Batch]:
        """Return the batches given by tenant and id, in no particular order, without those that do not exist."""
        groups = groupby(sorted(places), lambda place: place[0])
        calls = [self._read(tenant, [place[1] for place in group]) for tenant, group in groups]
        return [read_fields(words) for page in await asyncio.gather(*calls) for words in page if words]

    async def _read(self, tenant: str, ids: Sequence[str]) -> Sequence[Mapping[bytes, bytes]]:
        """Return the Redis fields of each batch, in the order of `ids`; they are empty if the batch does not exist."""
        async with self._client() as client:
            pipeline = client.pipeline(transaction=False)
            for key in (self._keys(tenant, batch_id, "batch")[0] for batch_id in ids):
                pipeline.hgetall(key)
            return await pipeline.execute()

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
    """Read a batch from a list of field names, each followed by its value."""
    return read_fields(dict(zip(words[::2], words[1::2], strict=True)))
