"""Batches shared by every gateway, in Redis or Valkey: one script a change, and the time is Redis's.

Keys of one tenant share the hash tag {tenant}; `*` is the configured prefix:

    *batch:{tenant}:ID         hash   the batch: what was asked for, its status, times and counts; `fence` of its last lease
    *batchwork:{tenant}:ID     zset   its open tasks, by when their leases run out in milliseconds; 0: nobody's
    *batchholders:{tenant}:ID  hash   task -> fence and owner of its lease
    *batchbits:{tenant}:ID     text   one bit a position: an answer to it is committed
    *batchparts:{tenant}:ID    set    names of the objects that hold committed answers
    *batches:{tenant}          zset   ids of all batches of the tenant, by when they were created
    *batchesopen:{tenant}      set    ids of those that have not ended
    *batchindex:{batches}      zset   TENANT/ID of whatever may have a task, by when its window is over

The index is a hint that leads to batches: it may name some that are over, and is never without one that is not.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from math import log2
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from gateway.batches.lease import ALL_TASKS, SHARD_SIZE, Lease, Standing, TaskKind
from gateway.batches.record import COUNTS, Batch, BatchError, NewBatch, Tally, batch_not_found, new_fields, read_fields
from gateway.core.errors import ApiError, Fault, invalid_request, unavailable
from gateway.limiter.breaker import Breaker
from gateway.limiter.calls import Argument, RedisCalls, Script, StoreError

PAGE = 256
"""Entries of the index read at a time."""
TOGETHER = 32
"""Batches of one tenant looked at in one call."""
CREATING_SECONDS = 3600
"""After its window, an entry that leads nowhere is taken for one whose batch never came to be."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A batch that may have a task."""

    tenant: str
    id: str
    deadline: float


class BatchStore:
    """Every method raises ApiError BATCHES_UNAVAILABLE while Redis is away: nothing is known to have happened then."""

    def __init__(
        self,
        client: Redis | RedisCluster,
        *,
        lease_seconds: float = 15.0,
        retention_seconds: float = 30 * 86_400.0,
        timeout: float = 5.0,
        prefix: str = "loralane:",
    ) -> None:
        """`timeout`: seconds of one call. `retention_seconds`: how long a batch is remembered after its end."""

    async def create(self, batch: NewBatch, max_open: int) -> Batch:
        """Doing it twice makes one. Raises ApiError: INSUFFICIENT_QUOTA, the tenant has `max_open` that have not ended."""

    async def discard(self, batch: Batch) -> None:
        """Forgets a batch that nobody has begun to work on; cancels it where somebody has."""

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """Raises ApiError: BATCH_NOT_FOUND."""

    async def list(self, tenant: str, after: str | None = None, limit: int = 20) -> tuple[list[Batch], bool]:
        """The newest first, and whether there are more. Raises ApiError: INVALID_REQUEST, `after` is no batch."""

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Doing it twice is the same. Raises ApiError: BATCH_NOT_FOUND; BATCH_CONFLICT, no line is left to cancel."""

    async def claim(self, owner: str, want: Collection[TaskKind] = ALL_TASKS) -> Lease | None:
        """A task that is nobody's, or whose lease has run out, of the most urgent batch that has one.

        Batches are equally urgent while the time they have left is the same to a factor of two; their tenants take
        turns, and each one's earliest deadline goes first.
        """

    async def renew(self, leases: Sequence[Lease]) -> dict[Lease, Standing]:
        """Extends each by a term, unless it is `ending`."""

    async def commit(self, lease: Lease, parts: Sequence[str], positions: Sequence[int], tally: Tally) -> bool:
        """Answers to `positions` count from now on, all or none: they lie in the objects named.

        Doing it twice with the same parts is the same. False: the lease is lost, and nothing has happened.
        """

    async def release(self, lease: Lease, retry_after: float = 0.0) -> None:
        """Hands a task back, for others after `retry_after` seconds; a shard whose positions are all done is over."""

    async def validated(self, lease: Lease, total: int, model: str | None = None) -> bool:
        """`total` lines are ready to run. False: the lease is lost. A batch that is ending has no lines to run."""

    async def invalid(self, lease: Lease, errors: Sequence[BatchError]) -> bool:
        """The batch has failed. False: the lease is lost."""

    async def parts(self, lease: Lease) -> list[str]:
        """Names of all objects that hold committed answers, in order."""

    async def finished(self, lease: Lease, output_file_id: str | None, error_file_id: str | None) -> bool:
        """The batch has ended as its outcome says. False: the lease is lost."""

    async def swept(self, lease: Lease) -> bool:
        """Nothing is left of the batch but what is remembered of it for a while. False: the lease is lost."""
