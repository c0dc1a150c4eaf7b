"""Runs the lines of one shard, from its claim until its release."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

import msgspec
import structlog

from gateway.batches.answers import LineAnswer, LineName, failed_answer, unrun_answer
from gateway.batches.context import BatchContext
from gateway.batches.input import BatchLine
from gateway.batches.lease import Lease
from gateway.batches.line_reader import IndexEntry, LineReader, read_index
from gateway.batches.line_turns import LineTurns
from gateway.batches.lines import LineRunner
from gateway.batches.parts import AnswerBuffer
from gateway.batches.retry import is_tenant_limit, retry_delay
from gateway.batches.trial import LOST_CODE, LOST_MESSAGE
from gateway.core.errors import ApiError, Fault, internal
from gateway.core.usage import DeferredUsage

LONG_REST_SECONDS = 5.0
"""A shard is released if a tenant's limit asks it to wait for at least this many seconds: a lease is only for running
work."""
REST_SECONDS = 60.0
"""Maximum seconds for which a released shard is not claimed again. It is short because limits can be changed."""

log = structlog.get_logger("batches")


class Shard:
    """`LeasedWork` on one shard, from its claim to its release. Each line is an asyncio task that waits for the
    tenant's limits, then for a place in the engine."""

    def __init__(self, context: BatchContext, lease: Lease, claimed: float) -> None:
        """`claimed` is the time on the loop's clock at which the claim of the lease was sent."""
        self.lease = lease
        self._context = context
        self._lines = LineRunner(context.gateway, context.holders, lease, claimed, context.responses)
        self.turns = LineTurns(context, self._lines, self.on_lease_lost)
        self._parts = AnswerBuffer(context.store, context.files, lease, context.wasted)
        self._running: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks of all lines. `drain` lets those finish that have a place in the engine."""
        self.is_draining = False
        self._is_over = False
        """True if the batch is ending, so that lines without an answer do not run again."""
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
                self._tasks = {group.create_task(self._line(reader, entry)) for entry in self.turns.in_order(entries)}
            if self._tasks:
                await asyncio.wait(self._tasks)
            self._parts.close()
        await self._context.store.release(self.lease, max(0.0, self.rests_until - self._now()))

    @property
    def needed(self) -> Collection[str]:
        """The base models and virtual models of the shard's lines that have not ended."""
        return self.turns.models.needed

    @property
    def waiting(self) -> Mapping[str, int]:
        """Numbers of lines that only wait until a gate admits them to an engine (`EnginePlace`), by base model or
        virtual model; none if the shard is slow or draining."""
        return {} if self.is_draining or self.turns.are_slow else self.turns.models.waiting

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
        for task in self._tasks - self.turns.inside:
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
            self.turns.models.end(entry.position)
            self._parts.add(entry.position, answer)
            self._context.count("failed" if answer.usage is None else "completed")

    async def _attempt(self, reader: LineReader, entry: IndexEntry, tries: Counter[Fault]) -> LineAnswer | None:
        """Wait for the line's turn (`LineTurns`), and try to answer it once. After a failure that may pass, count its
        fault in `tries` and wait. None means that the line may be tried again."""
        name, used = LineName(self.lease.batch_id, entry.line, ""), DeferredUsage()
        await self._parts.wait_for_room()
        try:
            async with self.turns.turn(entry.position) as begun:
                if begun is None:
                    return None
                line = msgspec.json.decode(await reader.get(entry), type=BatchLine)
                name = replace(name, custom_id=line.custom_id)
                if self.turns.is_given_up(entry.position):
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

    async def _wait(self, failure: ApiError, seconds: float, position: int) -> None:
        """Back off before the next attempt of the line at `position`. If a limit of the tenant refused it, all lines of
        the shard wait for `seconds`; if the lane was full, those of its base model; else only this one."""
        if is_tenant_limit(failure):
            self.turns.limit_window.refused(seconds)
            if seconds >= LONG_REST_SECONDS:
                self.drain(min(seconds, REST_SECONDS))
        elif failure.fault is Fault.LANE_QUEUE_FULL:
            self.turns.limit_window.lane_was_full(self.turns.models.of(position), seconds)
        else:
            await asyncio.sleep(seconds)
