"""Claims tasks of all tenants' batches, runs them under leases, and releases those that this gateway cannot finish."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from operator import itemgetter

import structlog

from gateway.batches.context import BatchContext
from gateway.batches.finalize import finalize, sweep
from gateway.batches.gate import Gate
from gateway.batches.lease import CONTROL_TASKS, Lease, TaskKind
from gateway.batches.leases import LeaseKeeper
from gateway.batches.shard import REST_SECONDS, Shard
from gateway.batches.store import ModelFilter, TaskFilter
from gateway.batches.tasks import ControlTask
from gateway.batches.tenant_turns import shard_quota, task_quota
from gateway.core.errors import ApiError, Fault
from gateway.core.space import SpaceUse

IDLE_SECONDS = 0.5
"""Seconds between two claims while there is no work."""
BUSY_SECONDS = 0.05
"""Seconds between two attempts to claim while this process has shards with enough lines, or has just claimed work."""
COUNT_SECONDS = 5.0
"""Seconds between two counts of open batches for metrics."""
AWAY_SECONDS = 2.0
"""Seconds until a task that failed because Redis or the storage is away is tried again."""
FULL_SECONDS = 30.0
"""Seconds until a task that failed because the disk has no room is tried again: it may read and write gigabytes."""
MAX_SLOW = 8
"""Maximum number of slow shards that this process holds: their lines are slowed by a tenant's limits or on trial.
Further ones are released, so that other shards can be claimed: first those of the tenants with the most of them, and of
a tenant those with the longest wait."""
CANCEL_SECONDS = 1.0
STOP_SECONDS = 5.0
"""Seconds that running work has to finish after the dispatcher begins to hand it over. Work that is still running is
then told to `stop` and, at the dispatcher's exit, cancelled after as many seconds again."""

log = structlog.get_logger("batches")

Validate = Callable[[Lease], Coroutine[None, None, None]]


class Dispatcher:
    """Works on batches while its context is entered; one per gateway process. On exit, or when the gateway begins to
    drain, it hands its work over."""

    def __init__(self, context: BatchContext, validate: Validate, *, owner: str, lease_seconds: float) -> None:
        """
        Args:
            context: dependencies of all work on batches.
            validate: checks the input of the batch of a lease and reports the result to the store.
            owner: unique name of this process in the store.
            lease_seconds: length of a lease, as in the store.
        """
        self._context = context
        self._validate = validate
        self._owner = owner
        self._leases = LeaseKeeper(context.store, lease_seconds)
        self._works: dict[asyncio.Task[None], Shard | ControlTask] = {}
        self._resting: dict[str, float] = {}
        """Times on the loop's clock until which batches that wait for a tenant's limit are not claimed, by batch id."""
        self.open = 0
        """Number of batches of all tenants with work left, as counted last (every COUNT_SECONDS)."""
        self._control_tasks_at = 0.0
        """Time on the loop's clock of the next claim of tasks without lines. The end of any work here sets it to 0."""
        self._news = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []

    @property
    def leases(self) -> Mapping[TaskKind, int]:
        """Number of leases that this process holds, by kind of task."""
        return Counter(work.lease.task for work in self._works.values())

    @property
    def backlog(self) -> Counter[str]:
        """Number of lines in this process's shards that only wait until a gate admits them to an engine
        (`EnginePlace`), by base model or virtual model."""
        waiting = Counter[str]()
        for shard in self._shards:
            waiting.update(shard.waiting)
        return waiting

    async def __aenter__(self) -> Dispatcher:
        context, leases = self._context, self._leases
        watches = [gate.watch for gate in context.gates.values() if isinstance(gate, Gate)]
        loops = (self._keep_claiming, leases.keep, *watches, self._keep_counting)
        self._background = [asyncio.create_task(_run_forever(loop), name=f"batch-{loop.__name__}") for loop in loops]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self.hand_over()
        await cancel_until_done(*self._works, *self._background)
        with suppress(ApiError):  # other processes then count this stop as a crash
            await self._leases.hand_back()

    async def hand_over(self) -> None:
        """Claim no more, and give the leases back, so that other gateways go on at once. Running lines get up to
        STOP_SECONDS to end; then those without an answer are stopped, and the answers have as long to be committed."""
        await cancel_until_done(self._background[0])
        for work in self._works.values():
            work.drain()
        await self._wait_for_works()
        for work in self._works.values():
            work.stop()
        await self._wait_for_works()
        self._background.append(asyncio.create_task(self._keep_handing_back(), name="batch-hand-back"))

    async def _keep_handing_back(self) -> None:
        """Release leases that were given up, as while Redis was away, until this process ends."""
        while True:
            with suppress(ApiError):
                await self._leases.hand_back()
            await asyncio.sleep(AWAY_SECONDS)

    async def _wait_for_works(self) -> None:
        if self._works:
            await asyncio.wait(self._works, timeout=STOP_SECONDS)

    async def _keep_claiming(self) -> None:
        is_away = False
        while True:
            try:
                has_claimed = await self._claim_some()
            except ApiError as error:
                if not is_away:
                    log.warning("batch_claims_wait", reason=error.reason)
                is_away = True
                await asyncio.sleep(AWAY_SECONDS)
                continue
            if is_away:
                log.info("batch_claims_go_on")
            is_away = False
            await self._pause(
                BUSY_SECONDS if has_claimed or self._has_enough else IDLE_SECONDS * random.uniform(0.5, 1.0)
            )

    async def _keep_counting(self) -> None:
        while True:
            with suppress(ApiError):  # the previous count remains
                self.open = await self._context.store.count()
            await asyncio.sleep(COUNT_SECONDS)

    async def _pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until some work here has ended, because the next task of its batch may be ready."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()

    async def _claim_some(self) -> bool:
        """Release lost leases and shards that make no progress here, and claim and start control tasks and, while the
        gate of an engine wants more lines, shards. Return whether any work was claimed. Raises ApiError while Redis is
        away."""
        await self._leases.hand_back()  # first, or this process would claim its own tasks as those of a dead one
        has_claimed = await self._claim_control_tasks()
        self._drain_useless()
        while await self._claim_shard():
            has_claimed = True
        return has_claimed

    async def _claim_shard(self) -> bool:
        """Claim and start a shard for an engine that wants more lines than this process's shards have waiting for it.
        Return whether one was claimed. None is claimed while the disk has no room for answers."""
        if not self._context.files.storage.has_room(SpaceUse.RESULT):
            return False
        waiting, gates = self.backlog, self._context.gates
        wanting = {model for model, gate in gates.items() if gate.wants_more(waiting[model])}
        quota = shard_quota((model, shard.lease.tenant) for shard in self._shards for model in shard.needed)

        def models(tenant: str) -> Mapping[str, bool]:
            admissions = {model: model in wanting and quota.admits(model, tenant) for model in gates}
            return {
                **admissions,
                "": admissions[next(iter(gates))],
            }  # lines of unknown models count as ones of the first

        return bool(wanting) and await self._claim(["shard"], models)

    async def _claim_control_tasks(self) -> bool:
        """Claim and start tasks without lines, of each tenant as many as `task_quota` admits; return whether there were
        any. Does nothing for up to IDLE_SECONDS after a call, unless work has ended here since that call began: a claim
        looks at every open batch."""
        has_claimed, now = False, asyncio.get_running_loop().time()
        if now < self._control_tasks_at:
            return has_claimed
        self._control_tasks_at = now + IDLE_SECONDS * random.uniform(0.5, 1.0)  # set first: work may end during a claim
        while await self._claim_control_task():
            has_claimed = True
        return has_claimed

    async def _claim_control_task(self) -> bool:
        quota = task_quota((work.lease.task, work.lease.tenant) for work in self._works.values())
        open_kinds = [kind for kind in CONTROL_TASKS if quota.has_room(kind)]
        return bool(open_kinds) and await self._claim(open_kinds, permits=quota.admits)

    async def _claim(
        self,
        want: Collection[TaskKind],
        models: ModelFilter = lambda tenant: {},
        permits: TaskFilter = lambda kind, tenant: True,
    ) -> bool:
        sent_at = asyncio.get_running_loop().time()
        skip = self._held_up() if "shard" in want else ()
        lease = await self._context.store.claim(self._owner, want, skip, models, permits)
        if lease is None:
            return False
        work = self._work(lease, sent_at)
        task = asyncio.create_task(self._do(work, sent_at), name=f"{lease.batch_id}-{lease.task_name}")
        self._works[task] = work
        task.add_done_callback(self._ended)
        return True

    def _work(self, lease: Lease, claimed: float) -> Shard | ControlTask:
        context, store, files = self._context, self._context.store, self._context.files
        if lease.task == "shard":
            return Shard(context, lease, claimed)

        async def work() -> None:
            if lease.task == "validate":
                await self._validate(lease)
            else:
                await (finalize if lease.task == "finalize" else sweep)(store, files, lease)

        return ControlTask(lease, store, files, context.quarantine, work)

    async def _do(self, work: Shard | ControlTask, claimed: float) -> None:
        lease = work.lease
        try:
            with self._leases.holding(lease, claimed, work):
                await work.run()
        except ApiError as error:
            log.warning("batch_task_waits", batch=lease.batch_id, task=lease.task_name, reason=error.reason)
            is_full = error.fault is Fault.INSUFFICIENT_STORAGE
            await self._release(lease, FULL_SECONDS if is_full else AWAY_SECONDS)
        except (
            Exception
        ):  # a bug, or a child process that died: the task is tried again after its lease, but only a few times
            log.exception("batch_task_failed", batch=lease.batch_id, task=lease.task_name)
        finally:
            if work.is_lost:
                self._leases.give_up(lease)

    async def _release(self, lease: Lease, seconds: float) -> None:
        """Release a task, which no process claims again for some seconds."""
        try:
            await self._context.store.release(lease, seconds)
        except ApiError:
            self._leases.give_up(lease)

    def _ended(self, task: asyncio.Task[None]) -> None:
        work = self._works.pop(task)
        if isinstance(work, Shard) and work.rests_until > asyncio.get_running_loop().time():
            self._resting[work.lease.batch_id] = work.rests_until
        self._control_tasks_at = 0.0
        self._news.set()

    @property
    def _shards(self) -> list[Shard]:
        return [work for work in self._works.values() if isinstance(work, Shard)]

    @property
    def _has_enough(self) -> bool:
        """True if, for an engine that admits lines now, the shards of this process already have as many waiting lines
        as it wants. The engine may soon want more, so the next claim is tried after BUSY_SECONDS."""
        waiting, gates = self.backlog, self._context.gates.items()
        return any(gate.is_passable and not gate.wants_more(waiting[model]) for model, gate in gates)

    def _held_up(self) -> set[str]:
        """Return the ids of the batches from which this process claims no further shard now: those that rest because a
        tenant's limit refused a line, and those of which it already holds a slow shard."""
        now = asyncio.get_running_loop().time()
        self._resting = {batch: until for batch, until in self._resting.items() if until > now}
        return {*self._resting, *(shard.lease.batch_id for shard in self._shards if shard.turns.are_slow)}

    def _drain_useless(self) -> None:
        """Release shards whose engines have long been away, and the slow shards above MAX_SLOW."""
        for shard in self._shards:
            if shard.turns.are_shut_out and not shard.is_draining:
                shard.drain()
        slow = [shard for shard in self._shards if shard.turns.are_slow and not shard.is_draining]
        for shard in by_tenant_turns(slow)[MAX_SLOW:]:
            shard.drain(REST_SECONDS)


def by_tenant_turns(slow: Iterable[Shard]) -> list[Shard]:
    """Return slow shards in turns of their tenants: first each tenant's shard with the shortest wait for limits, then
    each tenant's second, and so on. A tenant with many slow shards thus does not crowd out another's only one."""
    turns = Counter[str]()
    pairs = []
    for shard in sorted(slow, key=lambda shard: shard.turns.limit_window.seconds_to_next):
        turns[shard.lease.tenant] += 1
        pairs.append((turns[shard.lease.tenant], shard))
    return [shard for _, shard in sorted(pairs, key=itemgetter(0))]


async def _run_forever(loop: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await loop()
        except Exception:  # a bug: without another try this gateway would never work on a batch again
            log.exception("batch_loop_failed")
        await asyncio.sleep(AWAY_SECONDS)


async def cancel_until_done(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks again every CANCEL_SECONDS until all have ended: the Redis client may swallow a cancellation that
    coincides with a reply. Exceptions of the tasks are not raised."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_SECONDS)
