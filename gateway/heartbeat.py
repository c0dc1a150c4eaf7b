"""Notices an engine that is connected and does nothing: stopped, deadlocked, or stuck in a step.

The gateway asks for the engine's counters every few seconds. An engine that gives no answer, or that has running
requests and ends no step, for `HANG_SECONDS` counts as hung until it moves again. `/ready` and grpc.health then say so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import structlog

from engine.arrivals import EngineUnavailable
from engine.client import EngineApi
from engine.pb import engine_pb2 as pb

log = structlog.get_logger("gateway")

ASK_SECONDS = 2.0
"""Between two questions."""
HANG_SECONDS = 15.0
"""The longest step of a healthy engine takes a quarter of a second; compiling a kernel in one takes some seconds."""
MAX_OWN_STALL_SECONDS = 5.0
"""A longer pause between two looks at the clock is this process's own stall, which says nothing about the engine."""


class Heartbeat:
    """What the gateway knows of whether its engine moves."""

    def __init__(self, engine: EngineApi, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._engine = engine
        self._clock = clock
        self._moved = self._looked = clock()
        self._steps = -1
        self._told = False

    @property
    def trouble(self) -> str:
        """Why requests cannot be served now, in words for an operator; empty means that the engine is well."""
        if not self._engine.ready:
            return "the engine is not connected"
        return "the engine is connected but has stopped working" if self._silence() > HANG_SECONDS else ""

    def heard(self, stats: pb.EngineStats | None) -> None:
        """Take up an answer of the engine, or None where none came in time or the engine is not connected."""
        self._forgive_own_stall()
        if not self._engine.ready or (stats is not None and self._moves(stats)):
            self._moved = self._clock()
        if stats is not None:
            self._steps = stats.steps
        self._tell()

    def tick(self) -> None:
        """Look at the clock, and log what has changed."""
        self._tell()

    def _moves(self, stats: pb.EngineStats) -> bool:
        return stats.steps != self._steps or not any(lane.running for lane in stats.lanes)

    def _silence(self) -> float:
        self._forgive_own_stall()
        return self._clock() - self._moved

    def _forgive_own_stall(self) -> None:
        """Time in which this process did not run is not time in which the engine was silent."""
        now = self._clock()
        if now - self._looked > MAX_OWN_STALL_SECONDS:
            self._moved += now - self._looked
        self._looked = now

    def _tell(self) -> None:
        """Log when the engine begins to count as hung, and when it moves again."""
        hung = bool(self._engine.ready and self.trouble)
        if hung != self._told:
            self._told = hung
            if hung:
                log.error("engine_hung", seconds=round(self._silence(), 1))
            else:
                log.info("engine_moves_again")


@asynccontextmanager
async def beating(heartbeat: Heartbeat, engine: EngineApi) -> AsyncIterator[None]:
    """Ask the engine until the block ends."""
    tasks = [asyncio.create_task(_ask_forever(heartbeat, engine)), asyncio.create_task(_tick_forever(heartbeat))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)


async def _ask_forever(heartbeat: Heartbeat, engine: EngineApi) -> None:
    while True:
        try:
            heartbeat.heard(await engine.stats())
        except EngineUnavailable:
            heartbeat.heard(None)
        except Exception:
            log.exception("heartbeat_failed")
        await asyncio.sleep(ASK_SECONDS)


async def _tick_forever(heartbeat: Heartbeat) -> None:
    """Look at the clock while an answer is awaited, so that a stall of this process shows."""
    while True:
        await asyncio.sleep(1.0)
        heartbeat.tick()
