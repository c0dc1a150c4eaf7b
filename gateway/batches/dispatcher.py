"""Every gateway works on everybody's batches: it claims tasks, does them under leases, and hands back what it cannot
finish."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress

import structlog

from gateway.batches.errand import Errand
from gateway.batches.finalize import finalize
from gateway.batches.lease import SMALL_TASKS, Lease, TaskKind
from gateway.batches.leases import Leases
from gateway.batches.shard import REST_SECONDS, Shard, Workshop
from gateway.batches.sweep import sweep
from gateway.core.errors import ApiError

IDLE_SECONDS = 0.5
"""Between two questions for work, while there is none."""
BUSY_SECONDS = 0.05
"""Between two looks at whether lines are running out."""
COUNT_SECONDS = 5.0
"""Between two counts of open batches, for metrics."""
AWAY_SECONDS = 2.0
"""Until what failed because Redis or the storage is away is tried again."""
MAX_SHARDS = 32
MAX_SLOW = 8
"""Shards among them that may be held up by a tenant's limits or be on trial. If there are more, those that wait longest
are handed back, so that there are places for others."""
MAX_ERRANDS = 2
CANCEL_SECONDS = 1.0
STOP_SECONDS = 5.0
"""For which lines may go on when the gateway stops; then for what they have come to, to be committed."""

log = structlog.get_logger("batches")

Validate = Callable[[Lease], Coroutine[None, None, None]]


class Dispatcher:
    """Works from when it is entered until it is left; what is under way then may end for a while."""

    def __init__(self, shop: Workshop, validate: Validate, *, owner: str, lease_seconds: float) -> None:
        """`validate`: checks the input of the batch of a lease. `owner`: this process, in the store's books."""
        self._shop = shop
        self._validate = validate
        self._owner = owner
        self._leases = Leases(shop.store, lease_seconds)
        self._works: dict[asyncio.Task[None], Shard | Errand] = {}
        self._resting: dict[str, float] = {}
        """Batches that a limit holds up, and until when, on the loop's clock."""
        self.open = 0
        """Batches, of everybody, that something is left to do for; as they were counted last."""
        self._errands_at = 0.0
        """On the loop's clock: who has no lines is asked for its tasks then, or when some work has ended here."""
        self._news = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []

    @property
    def leases(self) -> Mapping[TaskKind, int]:
        """That are held, by kind."""
        return Counter(work.lease.task for work in self._works.values())

    @property
    def backlog(self) -> int:
        """Lines that are held here and could enter the engine now."""
        return sum(shard.waiting for shard in self._shards)

    async def __aenter__(self) -> Dispatcher:
        shop, leases = self._shop, self._leases
        loops = (self._keep_claiming, leases.keep, shop.gate.watch, self._keep_counting)
        self._background = [asyncio.create_task(_for_good(loop), name=f"batch-{loop.__name__}") for loop in loops]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        claims, *others = self._background
        await cancelled(claims)
        for work in self._works.values():
            work.drain()
        await self._wait_for_works()
        for work in self._works.values():
            work.end()
        await self._wait_for_works()
        await cancelled(*self._works, *others)
        with suppress(ApiError):  # then this stop is taken for a death
            await self._leases.hand_back()

    async def _wait_for_works(self) -> None:
        if self._works:
            await asyncio.wait(self._works, timeout=STOP_SECONDS)

    async def _keep_claiming(self) -> None:
        while True:
            try:
                found = await self._claim_some()
            except ApiError as error:
                log.warning("batch_claims_wait", reason=error.reason)
                await asyncio.sleep(AWAY_SECONDS)
                continue
            busy = found or (self._shards and not self._wants_lines)
            await self._pause(BUSY_SECONDS if busy else IDLE_SECONDS * random.uniform(0.5, 1.0))

    async def _keep_counting(self) -> None:
        while True:
            with suppress(ApiError):  # then the last count stands
                self.open = await self._shop.store.count()
            await asyncio.sleep(COUNT_SECONDS)

    async def _pause(self, seconds: float) -> None:
        """Cut short when some work has ended: what comes after it may be ready."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()

    async def _claim_some(self) -> bool:
        """Whether there was anything."""
        await self._leases.hand_back()  # first, or this process would claim its own tasks as those of a dead one
        found = await self._claim_errands()
        self._hand_back_slow()
        while len(self._shards) < MAX_SHARDS and self._wants_lines and await self._claim("shard"):
            found = True
        return found

    async def _claim_errands(self) -> bool:
        """Mostly there is none, and who asks looks at every open batch, so this is not done whenever lines run out."""
        found, now = False, asyncio.get_running_loop().time()
        if now < self._errands_at:
            return found
        while len(self._works) - len(self._shards) < MAX_ERRANDS and await self._claim(*SMALL_TASKS):
            found = True
        self._errands_at = now + IDLE_SECONDS * random.uniform(0.5, 1.0)
        return found

    async def _claim(self, *want: TaskKind) -> bool:
        asked = asyncio.get_running_loop().time()
        lease = await self._shop.store.claim(self._owner, want, self._held_up() if "shard" in want else ())
        if lease is None:
            return False
        work = self._work(lease, asked)
        task = asyncio.create_task(self._do(work, asked), name=f"{lease.batch_id}-{lease.member}")
        self._works[task] = work
        task.add_done_callback(self._ended)
        return True

    def _work(self, lease: Lease, claimed: float) -> Shard | Errand:
        shop, store, files = self._shop, self._shop.store, self._shop.files
        if lease.task == "shard":
            return Shard(shop, lease, claimed)

        async def work() -> None:
            if lease.task == "validate":
                await self._validate(lease)
            else:
                await (finalize if lease.task == "finalize" else sweep)(store, files, lease)

        return Errand(lease, store, files, shop.quarantine, work)

    async def _do(self, work: Shard | Errand, claimed: float) -> None:
        lease = work.lease
        try:
            with self._leases.holding(lease, claimed, work):
                await work.run()
        except ApiError as error:
            log.warning("batch_task_waits", batch=lease.batch_id, task=lease.member, reason=error.reason)
            await self._release(lease)
        except (
            Exception
        ):  # a bug, or a process that died: when the lease has run out it is tried again, but not for ever
            log.exception("batch_task_failed", batch=lease.batch_id, task=lease.member)
        finally:
            if work.is_lost:
                self._leases.give_up(lease)

    async def _release(self, lease: Lease) -> None:
        try:
            await self._shop.store.release(lease, AWAY_SECONDS)
        except ApiError:
            self._leases.give_up(lease)

    def _ended(self, task: asyncio.Task[None]) -> None:
        work = self._works.pop(task)
        if isinstance(work, Shard) and work.rests_until > asyncio.get_running_loop().time():
            self._resting[work.lease.batch_id] = work.rests_until
        self._errands_at = 0.0
        self._news.set()

    @property
    def _shards(self) -> list[Shard]:
        return [work for work in self._works.values() if isinstance(work, Shard)]

    @property
    def _wants_lines(self) -> bool:
        return self._shop.gate.wants(self.backlog)

    def _held_up(self) -> set[str]:
        """Batches of which there is enough here: what is held of them runs one line at a time, or waits for limits."""
        now = asyncio.get_running_loop().time()
        self._resting = {batch: until for batch, until in self._resting.items() if until > now}
        return {*self._resting, *(shard.lease.batch_id for shard in self._shards if shard.is_slow)}

    def _hand_back_slow(self) -> None:
        slow = sorted((shard for shard in self._shards if shard.is_slow), key=lambda shard: shard.pace.rest)
        for shard in slow[MAX_SLOW:]:
            shard.drain(REST_SECONDS)


async def _for_good(loop: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await loop()
        except Exception:  # a bug: without another try this gateway would never work on a batch again
            log.exception("batch_loop_failed")
        await asyncio.sleep(AWAY_SECONDS)


async def cancelled(*tasks: asyncio.Task[None]) -> None:
    """Until they have ended: a cancellation that comes together with Redis's answer may be swallowed by its client."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_SECONDS)
