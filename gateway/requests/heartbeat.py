"""Detects an engine that is connected but does nothing: stopped, deadlocked, or stuck in a step.

The gateway polls the engine's counters every few seconds. An engine that does not answer for `HANG_SECONDS`, or that
has running requests and ends no step for that long, counts as hung until it makes progress again. Meanwhile `/ready`
and grpc.health report that the engine's base model cannot be served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import structlog

from engine.pb import engine_pb2 as pb
from engine.rpc.api import EngineApi
from engine.rpc.stream import EngineUnavailable

log = structlog.get_logger("gateway")

ASK_SECONDS = 2.0
"""Seconds between an answer of the engine and the next poll."""
HANG_SECONDS = 15.0
"""Seconds without progress after which the engine counts as hung. The longest step of a healthy engine takes a quarter
of a second; a step in which a kernel is compiled takes some seconds."""
MAX_OWN_STALL_SECONDS = 5.0
"""Seconds. A longer pause between two readings of the clock is a stall of the gateway process, not of the engine."""


class Heartbeat:
    """Tracks whether the engine makes progress, from the counters that are passed to `heard`. Each gateway has one."""

    def __init__(self, engine: EngineApi, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self._engine = engine
        self._clock = clock
        self._moved = self._looked = clock()
        self._steps = -1
        self._told = False

    @property
    def trouble(self) -> str:
        """Message for operators: why the engine cannot serve requests now. Empty means that the engine is healthy."""
        if not self._engine.ready:
            return "the engine is not connected"
        return "the engine is connected but has stopped working" if self._silence() > HANG_SECONDS else ""

    def heard(self, stats: pb.EngineStats | None) -> None:
        """Process the counters that the engine sent, and log if the engine has begun or ceased to count as hung. None
        means that no answer came in time or that the engine is not connected."""
        self._forgive_own_stall()
        if not self._engine.ready or (stats is not None and self._moves(stats)):
            self._moved = self._clock()
        if stats is not None:
            self._steps = stats.steps
        self._tell()

    def tick(self) -> None:
        """Read the clock, to notice a stall of this process, and log if the engine has begun or ceased to be hung."""
        self._tell()

    def _moves(self, stats: pb.EngineStats) -> bool:
        return stats.steps != self._steps or not any(lane.running for lane in stats.lanes)

    def _silence(self) -> float:
        self._forgive_own_stall()
        return self._clock() - self._moved

    def _forgive_own_stall(self) -> None:
        """If the clock was last read too long ago, the gateway's own process did not run meanwhile: exclude that time
        from the engine's silence."""
        now = self._clock()
        if now - self._looked > MAX_OWN_STALL_SECONDS:
            self._moved += now - self._looked
        self._looked = now

    def _tell(self) -> None:
        """Log when the engine begins to count as hung, and when it makes progress again."""
        hung = bool(self._engine.ready and self.trouble)
        if hung != self._told:
            self._told = hung
            if hung:
                log.error("engine_hung", seconds=round(self._silence(), 1))
            else:
                log.info("engine_moves_again")


@asynccontextmanager
async def heartbeat_running(heartbeat: Heartbeat, engine: EngineApi) -> AsyncIterator[None]:
    """Poll the engine and pass its counters to `heartbeat`, in background tasks that are cancelled on exit."""
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
    """Call `tick` every second, also while `_ask_forever` awaits the engine's answer."""
    while True:
        await asyncio.sleep(1.0)
        heartbeat.tick()
