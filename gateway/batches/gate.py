"""Limits this gateway's batch lines in each engine to as many as `core.feed` allows, admitted by deadline."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

import structlog

from engine.core.messages.requests import Lane, LaneMode
from engine.pb import engine_pb2 as pb
from engine.rpc.api import EngineApi
from engine.rpc.stream import EngineUnavailable
from engine.rpc.wire import LANES, lane_mode_from_pb
from gateway.core.feed import MOST, Flow
from gateway.core.tenants import Tenant

POLL_SECONDS = 0.25
"""Seconds between two polls of the engine while there are lines."""

LEAST_FORGOTTEN = 64
"""An `AdmissionQueue` drops its cancelled waiters only when they outnumber the others by more than this, so that the
cost of rebuilding the queue is shared by many."""

log = structlog.get_logger("batches")


class LineGate(Protocol):
    """Admits lines to one engine, or to upstreams. See `Gate`."""

    @property
    def is_passable(self) -> bool: ...

    @property
    def closed_seconds(self) -> float: ...

    def wants_more(self, waiting: int) -> bool: ...

    async def enter(self, order: Order) -> EnginePlace:
        """Wait until a line is admitted, the least `order` first, and return its place, which the caller must leave."""

    def began(self) -> None:
        """Note that an admitted line has begun to run, so that another one may wait in the engine. `EnginePlace.begin`
        calls this."""

    def leave(self, place: EnginePlace) -> None:
        """Note that the line with this place has left the engine or will not enter it, so that another one may be
        admitted."""


class EnginePlace:
    """Permission of one line to be in the engine, from its admission by the gate until the line has left the engine."""

    def __init__(self, gate: LineGate) -> None:
        self._gate = gate
        self.has_begun = False

    def begin(self) -> None:
        """Report that the engine has begun to run the line, so that the gate may admit another line to wait there."""
        self.has_begun = True
        self._gate.began()

    def leave(self) -> None:
        self._gate.leave(self)


class Gate:
    """Admits this process's batch lines to the engine of one base model. It is closed while the engine is away, and
    while its batch lane is not open."""

    def __init__(self, engine: EngineApi, lane_capacity: Callable[[], int], clock: Callable[[], float]) -> None:
        """
        Args:
            engine: the engine that runs the lines.
            lane_capacity: returns how many requests this gateway admits to the batch lane. Batches use up to half of
                them.
            clock: returns a monotonic time in seconds.
        """
        self._engine = engine
        self._lane_capacity = lane_capacity
        self._clock = clock
        self._flow = Flow()
        self._queue = AdmissionQueue(self._room)
        self._open = False
        self._ended = 0
        self._looked = self._passable_at = clock()

    def of(self, tenant: Tenant) -> Gate:
        """Return the gate for lines of a tenant: this one, as every tenant may use a base model."""
        return self

    @property
    def is_passable(self) -> bool:
        """True if lines may enter the engine now, as far as there is room for them."""
        return self._open and self._engine.ready

    @property
    def closed_seconds(self) -> float:
        """Seconds since a poll last found the gate passable; 0 while it is."""
        return 0.0 if self.is_passable else self._clock() - self._passable_at

    @property
    def in_flight(self) -> int:
        """Number of admitted lines that have not left the engine, including those on their way to it."""
        return self._queue.inside + self._flow.begun

    def wants_more(self, waiting: int) -> bool:
        """Return whether this process should claim more lines: the gate is open, and `waiting`, the number of claimed
        lines that it has not admitted yet, is smaller than the number that should wait in the engine."""
        return self.is_passable and waiting < self._flow.target

    @asynccontextmanager
    async def place(self, order: Order) -> AsyncIterator[EnginePlace]:
        """Wait until the line is admitted to the engine, the least `order` first, and yield its place. On exit it is
        free again."""
        place = await self.enter(order)
        try:
            yield place
        finally:
            self.leave(place)

    async def enter(self, order: Order) -> EnginePlace:
        await self._queue.enter(order)
        return EnginePlace(self)

    def began(self) -> None:
        self._flow = replace(self._flow, begun=self._flow.begun + 1)
        self._queue.leave()

    def leave(self, place: EnginePlace) -> None:
        if not place.has_begun:
            self._queue.leave()
            return
        self._ended += 1
        self._flow = replace(self._flow, begun=self._flow.begun - 1)
        self._queue.admit()

    async def watch(self) -> None:
        """Poll the engine every POLL_SECONDS, forever."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_SECONDS)

    async def poll(self) -> None:
        """Read the batch lane's state from the engine, if there are lines here or the gate is closed, and close or open
        the gate; it closes if the engine is away. Then admit as many queued lines as there is room for."""
        if self._queue.queued or self.in_flight or not self._open:
            try:
                self._see(await self._engine.stats())
            except EngineUnavailable:
                self._open = False
        if self.is_passable:
            self._passable_at = self._clock()
        self._queue.admit()

    def _see(self, stats: pb.EngineStats) -> None:
        lane = next((lane for lane in stats.lanes if lane.lane == LANES[Lane.BATCH]), pb.LaneStats())
        self._open = lane_mode_from_pb(lane.mode) is LaneMode.OPEN
        now = self._clock()
        flow = replace(self._flow, waiting=self._queue.inside)
        self._flow = flow.after_poll(lane.running, lane.waiting, self._ended, now - self._looked)
        self._ended, self._looked = 0, now

    def _room(self) -> int:
        most = min(max(1, self._lane_capacity() // 2), self._engine.info.max_seqs + MOST)
        return replace(self._flow, waiting=self._queue.inside).room(most) if self.is_passable else 0


Order = tuple[Any, ...]
"""Sort key of a waiter in an `AdmissionQueue`. The least is admitted first."""


class AdmissionQueue:
    """Admits waiting coroutines in order. `inside` counts those admitted, until `leave` is called for each; `queued`
    the others."""

    def __init__(self, room: Callable[[], int]) -> None:
        """`room` returns how many more waiters may be admitted now; it is called at each `admit`."""
        self.inside = 0
        self.queued = 0
        self._room = room
        self._numbers = itertools.count()
        self._waiting: list[tuple[Order, int, asyncio.Future[None]]] = []

    async def enter(self, order: Order) -> None:
        """Wait until admitted; the least `order` goes first, ties in order of arrival. The caller must call `leave`
        afterwards. A cancelled call leaves the queue by itself."""
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (order, next(self._numbers), turn))
        self.queued += 1
        self.admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.queued -= 1
                self._forget_cancelled()
            else:
                self.leave()
            raise

    def leave(self) -> None:
        self.inside -= 1
        self.admit()

    def admit(self) -> None:
        """Admit as many waiters as `room` allows. Call this whenever there may be more room."""
        room = self._room() if self._waiting else 0
        while room > 0 and self._waiting:
            _, _, turn = heappop(self._waiting)
            if not turn.cancelled():
                turn.set_result(None)
                self.queued -= 1
                self.inside += 1
                room -= 1

    def _forget_cancelled(self) -> None:
        """Drop the cancelled waiters once they are most of the queue. Otherwise only `admit` drops them, and it drops
        none while there is no room."""
        if len(self._waiting) > 2 * self.queued + LEAST_FORGOTTEN:
            self._waiting = [waiter for waiter in self._waiting if not waiter[2].cancelled()]
            heapify(self._waiting)
