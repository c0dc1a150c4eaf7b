"""Batches for tests, and a store whose clock a test moves."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from file_fakes import build_files
from redis.asyncio import Redis

from gateway.batches.lease import Lease
from gateway.batches.record import Batch, NewBatch, new_batch_id
from gateway.batches.service import Batches
from gateway.batches.store import BatchStore
from gateway.batches.tenant_turns import TenantClaimOrder
from gateway.redis.client import Script
from gateway.responses.service import Responses
from gateway.responses.store import ResponseStore

START_MS = 1_800_000_000_000
CLOCK = "'test:seconds', 'test:microseconds'"


def wanted(tenant: str = "acme", window: str = "1h", **more: Any) -> NewBatch:
    return NewBatch(new_batch_id(), tenant, "a key", "/v1/completions", "file-1", window, **more)


class MovedStore(BatchStore):
    """Its scripts read the time from two keys: `set_time` writes them."""

    def __init__(self, client: Redis, **options: Any) -> None:
        super().__init__(client, **options)
        self._redis = client
        for name, script in self._scripts.items():
            text = script.text.replace("redis.call('TIME')", f"redis.call('MGET', {CLOCK})")
            assert text != script.text, "every script asks for the time in these words"
            self._scripts[name] = Script(text, hashlib.sha1(text.encode()).hexdigest())
        self.now_ms = START_MS

    async def begin_anew(self) -> None:
        """Empty the database and set its clock back to the start."""
        await self._redis.flushall()
        self._claim_order = TenantClaimOrder()
        await self.set_time(START_MS)

    async def set_time(self, now_ms: int) -> None:
        self.now_ms = now_ms
        seconds, ms = divmod(now_ms, 1000)
        await self._redis.mset({"test:seconds": seconds, "test:microseconds": ms * 1000})

    async def wait(self, seconds: float) -> None:
        await self.set_time(self.now_ms + int(seconds * 1000))


async def running(store: BatchStore, total: int, **more: Any) -> Batch:
    """Create a batch and validate it, so that its lines are ready to be claimed."""
    batch = await store.create(wanted(**more), 100)
    lease = await claimed(store, "validate")
    assert await store.validated(lease, total)
    return await store.get(batch.tenant, batch.id)


async def claimed(store: BatchStore, task: str) -> Lease:
    lease = await store.claim("me", {task})
    assert lease is not None and lease.task == task
    return lease


def batch_options(redis: Redis, folder: Path, max_open: int = 100) -> dict[str, Any]:
    """Return the options of an application that offers files and batches, but has no dispatcher to run them."""
    files = build_files(redis, folder)
    return {"files": files, "batches": Batches(BatchStore(redis, timeout=30.0), files, max_open)}


def stored_options(redis: Redis, folder: Path) -> dict[str, Any]:
    """Return the same, and stored responses and the list of gateways, for an application that offers all that is
    stored."""
    return {**batch_options(redis, folder), "responses": Responses(ResponseStore(redis)), "listed_in": redis}
