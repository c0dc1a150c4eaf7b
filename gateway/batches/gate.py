"""Places in the engine for lines of this gateway: given out by deadline, as many as `core.feed` says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog

from engine.arrivals import EngineUnavailable
from engine.client import EngineApi
from engine.core.types import Lane, LaneMode
from engine.pb import engine_pb2 as pb
from engine.wire import LANES, lane_mode_from_pb
from gateway.batches.turnstile import Order, Turnstile
from gateway.core.feed import MOST, Flow

LOOK_SECONDS = 0.25
"""Between two looks at the engine, while there are lines."""

log = structlog.get_logger("batches")


class Place:
    """One line's, from when it may ask for the engine until it has left it."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.has_begun = False

    def begin(self) -> None:
        """The engine works on it, so that another may wait there."""
        self.has_begun = True
        self._gate.began()


class Gate:
    """Closed while the engine is away, or its batch lane takes nothing."""

    def __init__(self, engine: EngineApi, lane_capacity: Callable[[], int], clock: Callable[[], float]) -> None:
        """`lane_capacity`: requests of the batch lane that this gateway lets in; half of them is left to others.

        `clock`: seconds.
        """
        self._engine = engine
        self._lane_capacity = lane_capacity
        self._clock = clock
        self._flow = Flow()
        self._turnstile = Turnstile(self._room)
        self._open = False
        self._shut_until = 0.0
        self._ended = 0
        self._looked = clock()

    @property
    def in_flight(self) -> int:
        """Lines that have one."""
        return self._turnstile.inside + self._flow.begun

    def wants(self, waiting: int) -> bool:
        """Whether there could soon be room for more lines than those that wait already."""
        return self._passable and waiting < self._flow.target

    @asynccontextmanager
    async def place(self, order: Order) -> AsyncIterator[Place]:
        """Waits for one."""
        await self._turnstile.enter(order)
        place = Place(self)
        try:
            yield place
        finally:
            self._leave(place)

    def began(self) -> None:
        self._flow = replace(self._flow, begun=self._flow.begun + 1)
        self._turnstile.leave()

    def shut(self, seconds: float) -> None:
        """Lets nobody in for so long."""
        self._shut_until = max(self._shut_until, self._clock() + seconds)

    async def watch(self) -> None:
        """Looks at the engine again and again; for good."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """At what waits in the engine, if anybody wants to know."""
        if self._turnstile.queued or self.in_flight or not self._open:
            try:
                self._see(await self._engine.stats())
            except EngineUnavailable:
                self._open = False
        self._turnstile.turn()

    def _see(self, stats: pb.EngineStats) -> None:
        lane = next((lane for lane in stats.lanes if lane.lane == LANES[Lane.BATCH]), pb.LaneStats())
        self._open = lane_mode_from_pb(lane.mode) is LaneMode.OPEN
        now = self._clock()
        flow = replace(self._flow, waiting=self._turnstile.inside)
        self._flow = flow.looked(lane.running, lane.waiting, self._ended, now - self._looked)
        self._ended, self._looked = 0, now

    @property
    def _passable(self) -> bool:
        return self._open and self._engine.ready and self._clock() >= self._shut_until

    def _room(self) -> int:
        most = min(max(1, self._lane_capacity() // 2), self._engine.info.max_seqs + MOST)
        return replace(self._flow, waiting=self._turnstile.inside).room(most) if self._passable else 0

    def _leave(self, place: Place) -> None:
        if not place.has_begun:
            self._turnstile.leave()
            return
        self._ended += 1
        self._flow = replace(self._flow, begun=self._flow.begun - 1)
        self._turnstile.turn()
