"""When each line of a shard may run: ordinary lines together, and suspects of a crash alone."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import structlog

from gateway.batches.context import BatchContext
from gateway.batches.gate import Gate, Order
from gateway.batches.line_models import LineModels
from gateway.batches.line_reader import IndexEntry
from gateway.batches.lines import LineRunner
from gateway.batches.marks import under_mark
from gateway.batches.pace import LimitWindow
from gateway.batches.route_gate import RouteGate
from gateway.batches.trial import MOST_MARKS
from gateway.core.tenants import KeyLapse

LONG_CLOSED_SECONDS = 30.0
"""A shard is released when all gates that it needs have been closed for this many seconds: other gateways may have
engines for its lines. It waits for a lane that is full for a moment and for an engine that restarts."""

log = structlog.get_logger("batches")


class LineTurns:
    """Gives the lines of one shard their turns, within the tenant's limits and the places in the engine."""

    def __init__(self, context: BatchContext, lines: LineRunner, on_lost: Callable[[], None]) -> None:
        """`lines` runs the shard's lines; `on_lost` is called if the lease turns out to be lost."""
        self.models = LineModels(context.gates, lines.lease)
        self.limit_window = LimitWindow()
        self.inside: set[asyncio.Task[None]] = set()
        """Tasks of the lines that have a place in the engine."""
        self._context = context
        self._lines = lines
        self._lease = lines.lease
        self._on_lost = on_lost
        self._losses = lines.lease.losses
        """Number of processes that may have died of the shard's lines. While it is not 0, all lines are suspects."""
        self._marks = Counter(lines.lease.marks)
        """Number of processes that died while a line ran as their only suspect, by position."""
        self._suspects: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks by base model, each held by one suspect line of the shard while it waits for its turn or runs."""

    def in_order(self, entries: Sequence[IndexEntry]) -> Sequence[IndexEntry]:
        """Return the shard's lines in the order in which they begin: last those in whose trials the most processes died
        (`_marks`). Logs it if the shard is suspect."""
        if self._losses:
            log.warning(
                "batch_shard_on_trial", batch=self._lease.batch_id, task=self._lease.task_name, losses=self._losses
            )
        return sorted(entries, key=lambda entry: self._marks[entry.position])

    @property
    def are_slow(self) -> bool:
        """True if lines of the shard run one at a time or not at all, so that more lines would only wait."""
        return bool(self._losses) or self.limit_window.is_limited

    @property
    def are_shut_out(self) -> bool:
        """True if the gates to all engines that the shard's lines need have been closed, because the engine is away or
        its batch lane is not open, for LONG_CLOSED_SECONDS."""
        gates = [self._gate(model) for model in self.models.needed]
        return bool(gates) and all(gate.closed_seconds > LONG_CLOSED_SECONDS for gate in gates)

    def is_given_up(self, position: int) -> bool:
        """Return whether so many processes died of a line that it does not run again."""
        return self._marks[position] >= MOST_MARKS

    @asynccontextmanager
    async def turn(self, position: int) -> AsyncIterator[Callable[[], None] | None]:
        """Wait until the line at `position` may run: an ordinary one together with others (`_place`), a suspect alone
        (`_trial`). Yields a function to call when the engine has begun to run the line; None means that the line must
        try again, or that the lease is lost."""
        if not self._is_suspect(position):
            async with self._place(position) as begun:
                yield begun
            return
        model = self.models.of(position)
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
        quarantine, model, order = self._context.quarantine, self.models.of(position), self._order(position)
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
        quarantine, model = self._context.quarantine, self.models.of(position)
        async with (
            quarantine.suspect_turn(model),
            self._gate(model).place(self._order(position)) as place,
            quarantine.alone(),
            under_mark(self._context.store, self._lease, position) as suspicion,
        ):
            if suspicion is None:
                self._on_lost()
                yield None
                return
            self._losses, self._marks[position] = suspicion.losses, suspicion.marks
            with self._inside_engine(position):
                yield place.begin

    def _is_suspect(self, position: int) -> bool:
        return bool(self._losses or self._marks[position])

    def _gate(self, model: str) -> Gate | RouteGate:
        """Return the gate of a base or virtual model for lines of the shard's tenant."""
        gate, holder = self._context.gates[model], self._lines.holder
        return gate if isinstance(holder, KeyLapse) else gate.of(holder.tenant)

    def _order(self, position: int) -> Order:
        return self._lines.deadline, self._lease.batch_id, position

    @contextmanager
    def _inside_engine(self, position: int) -> Iterator[None]:
        """Count the line at `position` as one in the engine, and add the current task to those that `drain` lets
        finish, until exit."""
        task = asyncio.current_task()
        assert task is not None, "lines are tasks"
        self.inside.add(task)
        self.models.enter(position)
        try:
            yield
        finally:
            self.inside.discard(task)
            self.models.leave(position)
