"""Runs the lines of one shard, from its claim until its release."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

import msgspec
import structlog

from gateway.batches.answers import LineAnswer, LineName, failed_answer, unrun_answer
from gateway.batches.gate import Gate, Order
from gateway.batches.input import BatchLine
from gateway.batches.lease import Lease
from gateway.batches.line_models import LineModels
from gateway.batches.line_reader import IndexEntry, LineReader, read_index
from gateway.batches.lines import LineRunner
from gateway.batches.marks import under_mark
from gateway.batches.pace import LimitWindow
from gateway.batches.parts import AnswerBuffer
from gateway.batches.quarantine import Quarantine
from gateway.batches.retry import is_tenant_limit, retry_delay
from gateway.batches.route_gate import RouteGate
from gateway.batches.store import BatchStore
from gateway.batches.trial import LOST_CODE, LOST_MESSAGE, MOST_MARKS
from gateway.core.errors import ApiError, Fault, internal
from gateway.core.tenants import KeyHolders, KeyLapse
from gateway.core.usage import DeferredUsage
from gateway.files.service import Files
from gateway.requests.service import Gateway
from gateway.responses.service import Responses

LONG_REST_SECONDS = 5.0
"""A shard is released if a tenant's limit asks it to wait for at least this many seconds: a lease is only for running
work."""
REST_SECONDS = 60.0
"""Maximum seconds for which a released shard is not claimed again. It is short because limits can be changed."""
LONG_CLOSED_SECONDS = 30.0
"""A shard is released when all gates that it needs have been closed for this many seconds: other gateways may have
engines for its lines. It waits for a lane that is full for a moment and for an engine that restarts."""

log = structlog.get_logger("batches")


@dataclass(frozen=True, slots=True)
class BatchContext:
    """Dependencies of all work on batches in one gateway process."""

    store: BatchStore
    files: Files
    gateway: Gateway
    holders: KeyHolders
    gates: Mapping[str, Gate | RouteGate]
    """The gates that admit lines to the engines: one for each base model, in the order of the configuration, then one
    for each virtual model, by the model's name."""
    count: Callable[[str], None]
    """Called for every answered line with its result, "completed" or "failed", for metrics."""
    wasted: Callable[[int], None] = lambda tokens: None
    """Called with the tokens of each run of a line that no tenant is charged for, because the line runs again."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    responses: Responses | None = None
    """Stores and continues responses. None means that lines that need that are refused."""


class Shard:
    """`LeasedWork` on one shard, from its claim to its release. Each line is an asyncio task that waits for the
    tenant's limits, then for a place in the engine."""

    def __init__(self, context: BatchContext, lease: Lease, claimed: float) -> None:
        """`claimed` is the time on the loop's clock at which the claim of the lease was sent."""
        self.lease = lease
        self.limit_window = LimitWindow()
        self._context = context
        self._lines = LineRunner(context.gateway, context.holders, lease, claimed, context.responses)
        self._parts = AnswerBuffer(context.store, context.files, lease, context.wasted)
        self._running: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._inside: set[asyncio.Task[None]] = set()
        """Tasks of the lines that have a place in the engine. `drain` lets them finish."""
        self._losses = lease.losses
        """Number of processes that may have died of the shard's lines. While it is not 0, all lines are suspects."""
        self._marks = Counter(lease.marks)
        """Number of processes that died while a line ran as their only suspect, by position."""
        self._suspects: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks by base model, each held by one suspect line of the shard while it waits for its turn or runs."""
        self._models = LineModels(context.gates, lease)
        self.is_draining = False
        self._is_over = False
        """True if the batch is ending, so that lines without an answer do not run again."""
        self._deadline = claimed + lease.seconds_left
        self.rests_until = 0.0
        """Time on the loop's clock until which no process claims the shard again after its release."""
        self.is_lost = False

    async def run(self) -> None:
        """Run until every line is answered or the shard is told to stop. Answers are committed, and then the shard is
        released. If the task is cancelled, as by `on_lease_lost`, only what was already committed remains.

        Raises ApiError if the lines cannot be read or the shard cannot be released; ExceptionGroup if a commit raises.
        """
        self._running = asyncio.current_task()
        source = await self._context.files.get(self.lease.tenant, self.lease.batch.input_file_id)
        entries = await read_index(self._context.files.storage, self.lease)
        reader = LineReader(self._context.files, source)
        await reader.read_ahead(entries)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._commit())
            if not self.is_draining:
                self._tasks = {group.create_task(self._line(reader, entry)) for entry in self._in_order(entries)}
            if self._tasks:
                await asyncio.wait(self._tasks)
            self._parts.close()
        await self._context.store.release(self.lease, max(0.0, self.rests_until - self._now()))

    def _in_order(self, entries: Sequence[IndexEntry]) -> Sequence[IndexEntry]:
        """Return the shard's lines in the order in which they begin: last those in whose trials the most processes died
        (`_marks`). Logs it if the shard is suspect."""
        if self._losses:
            log.warning(
                "batch_shard_on_trial", batch=self.lease.batch_id, task=self.lease.task_name, losses=self._losses
            )
        return sorted(entries, key=lambda entry: self._marks[entry.position])

    @property
    def is_slow(self) -> bool:
        """True if lines of the shard run one at a time or not at all, so that more lines would only wait."""
        return bool(self._losses) or self.limit_window.is_limited

    @property
    def is_shut_out(self) -> bool:
        """True if the gates to all engines that the shard's lines need have been closed, because the engine is away or
        its batch lane is not open, for LONG_CLOSED_SECONDS. The dispatcher then releases the shard, for gateways with
        other engines."""
        gates = [self._gate(model) for model in self.needed]
        return bool(gates) and all(gate.closed_seconds > LONG_CLOSED_SECONDS for gate in gates)

    @property
    def needed(self) -> Collection[str]:
        """The base models and virtual models of the shard's lines that have not ended."""
        return self._models.needed

    @property
    def waiting(self) -> Mapping[str, int]:
        """Numbers of lines that only wait until a gate admits them to an engine (`EnginePlace`), by base model or
        virtual model; none if the shard is slow or draining."""
        return {} if self.is_draining or self.is_slow else self._models.waiting

    def on_lease_lost(self) -> None:
        self.is_lost = self.is_draining = True
        self._parts.drop()
        if self._running is not None:
            self._running.cancel()

    def end(self) -> None:
        self._is_over = True
        self.stop()

    def stop(self) -> None:
        """Stop all lines, because the gateway ends; another runs them again."""
        self.is_draining = True
        for task in self._tasks:
            task.cancel()

    def drain(self, rest: float = 0.0) -> None:
        """Begin no more lines; those in the engine finish. No process claims the released shard again for `rest`
        seconds."""
        self.is_draining = True
        self.rests_until = max(self.rests_until, self._now() + rest)
        for task in self._tasks - self._inside:
            task.cancel()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _commit(self) -> None:
        if not await self._parts.commit():
            self.on_lease_lost()

    async def _line(self, reader: LineReader, entry: IndexEntry) -> None:
        answer, tries = None, Counter[Fault]()
        while answer is None and not self.is_draining:
            answer = await self._attempt(reader, entry, tries)
        if answer is not None:
            self._models.end(entry.position)
            self._parts.add(entry.position, answer)
            self._context.count("failed" if answer.usage is None else "completed")

    async def _attempt(self, reader: LineReader, entry: IndexEntry, tries: Counter[Fault]) -> LineAnswer | None:
        """Wait until the line may run (`_turn`), and try to answer it once. After a failure that may pass, count its
        fault in `tries` and wait. None means that the line may be tried again."""
        name, used = LineName(self.lease.batch_id, entry.line, ""), DeferredUsage()
        await self._parts.wait_for_room()
        try:
            async with self._turn(entry.position) as begun:
                if begun is None:
                    return None
                line = msgspec.json.decode(await reader.get(entry), type=BatchLine)
                name = replace(name, custom_id=line.custom_id)
                if self._marks[entry.position] >= MOST_MARKS:
                    return unrun_answer(name, LOST_CODE, LOST_MESSAGE)
                return await self._lines.run(name, bytes(line.body), begun, used)
        except asyncio.CancelledError:
            self._end_unanswered(used)
            raise
        except ApiError as error:
            failure = error.with_traceback(None)  # which refers to this frame, and so to the line, while it waits
        except Exception:  # as in the HTTP server, a bug fails only this line
            log.exception("batch_line_failed", request_id=name.request_id)
            failure = internal(name.request_id)
        tries[failure.fault] += 1
        wait = retry_delay(failure, tries[failure.fault], time.time(), self._lines.left)
        if wait is None:
            return failed_answer(name, failure, used)
        self._context.wasted(used.tokens)
        await self._wait(failure, wait, entry.position)
        return None

    def _end_unanswered(self, used: DeferredUsage) -> None:
        """Charge what a line has used that ends without an answer because its batch does, such as by a tenant's cancel.
        A line that runs again is charged for its next run only."""
        if self._is_over and not self.is_lost:
            self._parts.add_usage(used)
        else:
            self._context.wasted(used.tokens)

    def _is_suspect(self, position: int) -> bool:
        return bool(self._losses or self._marks[position])

    @asynccontextmanager
    async def _turn(self, position: int) -> AsyncIterator[Callable[[], None] | None]:
        """Wait until the line at `position` may run: an ordinary one together with others (`_place`), a suspect alone
        (`_trial`). Yields a function to call when the engine has begun to run the line; None means that the line must
        try again, or that the lease is lost."""
        if not self._is_suspect(position):
            async with self._place(position) as begun:
                yield begun
            return
        model = self._models.of(position)
        async with self._suspects[model]:
            await asyncio.sleep(self.limit_window.seconds_to_next_of(model))
            if self._is_suspect(position):
                async with self._trial(position) as begun:
                    yield begun
            else:  # the processes that had the shard before turned out to live
                yield None

    @asynccontextmanager
    async def _place(self, position: int) -> AsyncIterator[Callable[[], None] | None]:
        """Wait for the tenant's limits and a place in the engine for the line at `position`, held until exit. Yield a
        function to call when the engine has begun to run the line, or None if a suspect wants to be alone: the line
        must then try again."""
        quarantine, model, order = self._context.quarantine, self._models.of(position), self._order(position)
        await quarantine.until_free()
        async with (
            self.limit_window.attempt(model, order) as asking,
            self._gate(model).place(order) as place,
        ):
            if not quarantine.enter():
                yield None
                return

            def begun() -> None:
                asking.admitted()
                place.begin()

            try:
                with self._inside_engine(position):
                    yield begun
            finally:
                quarantine.leave()

    @asynccontextmanager
    async def _trial(self, position: int) -> AsyncIterator[Callable[[], None] | None]:
        """Wait for a suspect's turn and a place in the engine, set the line's mark in Redis, and let no other batch
        line run until exit. Yields what `_place` yields; None means that the lease is lost."""
        quarantine, model = self._context.quarantine, self._models.of(position)
        async with (
            quarantine.suspect_turn(model),
            self._gate(model).place(self._order(position)) as place,
            quarantine.alone(),
            under_mark(self._context.store, self.lease, position) as suspicion,
        ):
            if suspicion is None:
                self.on_lease_lost()
                yield None
                return
            self._losses, self._marks[position] = suspicion.losses, suspicion.marks
            with self._inside_engine(position):
                yield place.begin

    def _gate(self, model: str) -> Gate | RouteGate:
        """Return the gate of a base or virtual model for lines of the shard's tenant."""
        gate, holder = self._context.gates[model], self._lines.holder
        return gate if isinstance(holder, KeyLapse) else gate.of(holder.tenant)

    def _order(self, position: int) -> Order:
        return self._deadline, self.lease.batch_id, position

    @contextmanager
    def _inside_engine(self, position: int) -> Iterator[None]:
        """Count the line at `position` as one in the engine, and add the current task to those that `drain` lets
        finish, until exit."""
        task = asyncio.current_task()
        assert task is not None, "lines are tasks"
        self._inside.add(task)
        self._models.enter(position)
        try:
            yield
        finally:
            self._inside.discard(task)
            self._models.leave(position)

    async def _wait(self, failure: ApiError, seconds: float, position: int) -> None:
        """Back off before the next attempt of the line at `position`. If a limit of the tenant refused it, all lines of
        the shard wait for `seconds`; if the lane was full, those of its base model; else only this one."""
        if is_tenant_limit(failure):
            self.limit_window.refused(seconds)
            if seconds >= LONG_REST_SECONDS:
                self.drain(min(seconds, REST_SECONDS))
        elif failure.fault is Fault.LANE_QUEUE_FULL:
            self.limit_window.lane_was_full(self._models.of(position), seconds)
        else:
            await asyncio.sleep(seconds)
