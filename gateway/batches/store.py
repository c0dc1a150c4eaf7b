"""Leases of batches' tasks in Redis, and what their holders change. Its keys are those of `gateway.batches.catalog`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from gateway.batches.catalog import PAGE, BatchCatalog
from gateway.batches.lease import ALL_TASKS, SHARD_SIZE, Lease, Standing, TaskKind, read_lease
from gateway.batches.record import COUNTS, BatchError, Tally
from gateway.batches.tenant_turns import Candidate, TenantClaimOrder, index_entry, parse_candidates
from gateway.batches.trial import Suspicion
from gateway.core.usage import Counts, RowKey
from gateway.limiter.usage_spool import COUNT_ROWS, UsageTerms
from gateway.redis.client import Argument

MAX_REMEMBERED = 2000
"""Number of a tenant's newest batches whose records are kept for the whole retention time. Older ones are deleted once
they have ended and were swept: a record may have 40 KB, and a tenant may create and cancel fifty batches a second."""
NO_USAGE: Mapping[RowKey, Counts] = MappingProxyType({})
BATCHES_PER_CALL = 32
"""Number of batches of one tenant in which one script call looks for a task."""


ModelFilter = Callable[[str], Mapping[str, bool]]
"""Function from a tenant's name to a mapping that says, for each base model, whether to claim lines of it. Its key ""
decides about models that are missing in the mapping; without that key, their lines are claimed."""
TaskFilter = Callable[[TaskKind, str], bool]
"""Function that says whether to claim tasks of a kind of a tenant, by its name."""


class BatchStore(BatchCatalog):
    """Batches in Redis, with the leases under which gateways work on them. Every method raises ApiError
    (REGISTRY_UNAVAILABLE) while Redis is away; it is then unknown whether the change happened."""

    def __init__(
        self,
        client: Redis | RedisCluster,
        *,
        lease_seconds: float = 15.0,
        retention_seconds: float = 30 * 86_400.0,
        timeout: float = 5.0,
        prefix: str = "loralane:",
        webhook_tenants: Collection[str] = (),
        usage_days: int = 400,
    ) -> None:
        """
        Args:
            lease_seconds: length of a lease.
            retention_seconds: how long the record of a batch is kept after its end.
            timeout: time limit of one call, in seconds.
            prefix: prefix of all keys.
            webhook_tenants: tenants that are notified by webhook: the end of a batch adds an event to their outbox.
            usage_days: days for which the limiter keeps a day's usage, to which commits add.
        """
        super().__init__(client, prefix, timeout)
        self._webhook_tenants = frozenset(webhook_tenants)
        self._usage = UsageTerms(self._calls, usage_days)
        self._lease_ms = int(lease_seconds * 1000)
        self._retention_ms = int(retention_seconds * 1000)
        self._claim_order = TenantClaimOrder()
        self._scripts["commit"] = COUNT_ROWS + self._scripts["commit"]

    async def claim(
        self,
        owner: str,
        want: Collection[TaskKind] = ALL_TASKS,
        skip: Collection[str] = (),
        models: ModelFilter = lambda tenant: {},
        permits: TaskFilter = lambda kind, tenant: True,
    ) -> Lease | None:
        """Lease a task that has no holder, or whose lease has run out, from the most urgent batch that has one. None
        means that no task is available.

        Batches are equally urgent if the time left in their windows lies between the same powers of two. Tenants of
        equally urgent batches take turns, and each tenant's earliest deadline goes first.

        Args:
            owner: name of this process.
            want: kinds of tasks to claim.
            skip: ids of batches that are passed over.
            models: says which base models' lines to claim. A shard is passed over unless one of its lines without an
                answer is of such a model.
            permits: says which of the kinds in `want` to claim of a tenant.
        """
        first, more = 0, True
        while more:
            now, entries = await self._run("look", [self._index], [first, first + PAGE - 1])
            candidates = parse_candidates(entries)
            wanted = [candidate for candidate in candidates if candidate.id not in skip]
            for tenant, group in groupby(
                self._claim_order.by_urgency(wanted, int(now) / 1e6), lambda candidate: candidate.tenant
            ):
                batches, wanted_models = list(group), models(tenant)
                kinds = " ".join(kind for kind in want if permits(kind, tenant))
                if not kinds or (wanted_models and not any(wanted_models.values())):
                    continue
                args: list[Argument] = [self._lease_ms, owner, kinds, msgspec.json.encode(wanted_models)]
                for start in range(0, len(batches), BATCHES_PER_CALL):
                    lease = await self._claim(tenant, batches[start : start + BATCHES_PER_CALL], args, int(now) / 1e6)
                    if lease is not None:
                        self._claim_order.claimed(tenant)
                        return lease
            first, more = first + PAGE, len(candidates) == PAGE
        return None

    async def renew(self, leases: Sequence[Lease]) -> dict[Lease, Standing]:
        """Extend each lease to `lease_seconds` from now unless its standing is `lost` or `ending`. Return the
        standings."""
        calls = [self._of(lease, "renew", ("batchwork", "batchholders"), [self._lease_ms]) for lease in leases]
        return {lease: word.decode() for lease, word in zip(leases, await asyncio.gather(*calls), strict=True)}

    async def commit(
        self,
        lease: Lease,
        parts: Sequence[str],
        positions: Sequence[int],
        tally: Tally,
        usage: Mapping[RowKey, Counts] = NO_USAGE,
    ) -> bool:
        """Commit the answers to `positions`, stored in the objects `parts` (at least one), add `tally` and charge
        `usage`: all or nothing. False means that the lease is lost. Raises ValueError if a position is outside the
        shard or committed.

        Without positions, only the usage is charged, and the name in `parts` stands for no object. Repeating the call
        with the same parts changes nothing.
        """
        counts = [word for name in COUNTS for word in (name, getattr(tally, name))]
        keys, rows = self._usage.rows(lease.tenant, usage)
        args: list[Argument] = [len(parts), *parts, len(positions), *positions, len(COUNTS), *counts, *rows]
        committed = await self._of(lease, "commit", ("batchholders", "batchbits", "batchparts"), args, keys)
        if committed < 0:
            raise ValueError(f"some of {positions} in {parts} are not {lease.batch_id}'s to commit")
        return bool(committed)

    async def release(self, lease: Lease, retry_after: float = 0.0) -> None:
        """Release a task, which any process may claim after `retry_after` seconds. A shard without open positions is
        removed, and after the last one the batch is finalized. Also removes this lease's loss and marks, which shows
        that its process lives; a lost lease is released for that reason only."""
        await self._of(lease, "release", ("batchwork", "batchholders", "batchbits"), [int(retry_after * 1000)])

    async def begin_trial(self, lease: Lease, position: int | None = None) -> Suspicion | None:
        """Mark a line, or the task itself if `position` is None, as running alone in this process. Return what other
        processes recorded; None, without a mark, means that the lease is lost."""
        fields = await self._mark(lease, position, "begin")
        return Suspicion(*fields) if fields else None

    async def end_trial(self, lease: Lease, position: int | None = None) -> None:
        """Remove this lease's mark of a line, or of the task itself if `position` is None: the process survived."""
        await self._mark(lease, position, "end")

    async def keep_mark(self, lease: Lease, position: int | None = None) -> None:
        """Make this lease's mark permanent (remove it if the lease is lost): the line or task failed by a bug."""
        await self._mark(lease, position, "keep", secrets.token_hex(4))

    async def validated(
        self, lease: Lease, total: int, model: str | None = None, model_lines: Sequence[tuple[str, int]] = ()
    ) -> bool:
        """Report valid input: create the shards of `total` lines and set the models (see `Batch`), or turn a batch that
        is ending to its `finalize` task. False means that the lease is lost."""
        args: list[Argument] = [total, SHARD_SIZE, model or "", msgspec.json.encode(model_lines)]
        return bool(await self._of(lease, "validated", ("batchwork", "batchholders"), args))

    async def invalid(self, lease: Lease, errors: Sequence[BatchError]) -> bool:
        """End the batch as failed, with errors. A batch that was cancelled while it was validated is finalized instead,
        and one that was cancelled and cannot be finalized ends as cancelled. False means that the lease is lost."""
        return bool(await self._of(lease, "invalid", self._ending(lease), [msgspec.json.encode(errors)]))

    async def parts(self, lease: Lease) -> Sequence[str]:
        """Return the sorted names of all storage objects that hold committed answers of the lease's batch."""
        [key] = self._keys(lease.tenant, lease.batch_id, "batchparts")
        async with self._client() as client:
            return sorted(name.decode() for name in await client.smembers(key))

    async def finished(self, lease: Lease, output_file_id: str | None, error_file_id: str | None) -> bool:
        """Store the ids of the result files and end the batch as its outcome says. False means that the lease is
        lost."""
        args: list[Argument] = [output_file_id or "", error_file_id or ""]
        return bool(await self._of(lease, "finished", self._ending(lease), args))

    async def swept(self, lease: Lease) -> bool:
        """Delete an ended batch's working keys and its index entry. Its record remains for `retention_seconds`, or
        until its tenant has swept batches beyond the MAX_REMEMBERED newest. False means that the lease is lost."""
        kinds = ("batchwork", "batchholders", "batchbits", "batchparts", "batches")
        if not await self._of(lease, "swept", kinds, [self._retention_ms, lease.batch_id, MAX_REMEMBERED]):
            return False
        await self._leave_index([index_entry(lease.tenant, lease.batch_id)])
        return True

    async def _claim(
        self, tenant: str, batches: Sequence[Candidate], args: Sequence[Argument], now: float
    ) -> Lease | None:
        """Lease a task from one tenant's batches, tried in this order, or return None. Removes batches without work
        from the index. `args` are those of `claim.lua`; `now` is Redis's time in Unix seconds."""
        kinds = ("batch", "batchwork", "batchholders", "batchbits")
        keys = [key for batch in batches for key in self._keys(tenant, batch.id, *kinds)]
        words, *parts = await self._run("claim", keys, args)
        gone = [batch for word, batch in zip(words, batches, strict=False) if batch.is_over(word, now)]
        if gone:
            await self._leave_index([index_entry(batch.tenant, batch.id) for batch in gone])
        return read_lease(words[-1].decode(), *parts) if parts else None

    def _ending(self, lease: Lease) -> tuple[str, ...]:
        """Return the kinds of Redis keys, besides `batch`, that the scripts which end a batch need: `webhooks` is among
        them if the tenant is notified by webhook."""
        kinds = ("batchwork", "batchholders", "batchesopen")
        return (*kinds, "webhooks") if lease.tenant in self._webhook_tenants else kinds

    async def _mark(self, lease: Lease, position: int | None, *how: str) -> Any:
        return await self._of(
            lease, "begin", ("batchholders",), [lease.task_name if position is None else position, *how]
        )

    async def _of(
        self, lease: Lease, script: str, kinds: Sequence[str], args: Sequence[Argument], more: Sequence[str] = ()
    ) -> Any:
        """Run a script on the key `batch` of a lease's batch, those of `kinds` and the keys `more`, and return its
        reply. The lease's task and fence precede `args`."""
        keys = [*self._keys(lease.tenant, lease.batch_id, "batch", *kinds), *more]
        return await self._run(script, keys, [lease.task_name, str(lease.fence), *args])
