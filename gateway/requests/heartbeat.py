"""Detects an engine that is connected but does nothing: stopped, deadlocked, or stuck in a step.

The gateway polls the engine's counters every few seconds. An engine that does not answer for `HANG_LOOKS` seconds, or
that has running requests and ends no step for that long, counts as hung until it makes progress again. Meanwhile
`/ready` and grpc.health report that the engine's base model cannot be served. `gateway.core.hanging` says who else
looks for engines that hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog

from engine.pb import engine_pb2 as pb
from engine.rpc.api import EngineApi
from engine.rpc.stream import EngineUnavailable
from gateway.core.hanging import StillLooks

log = structlog.get_logger("gateway")

ASK_SECONDS = 2.0
"""Seconds between an answer of the engine and the next poll."""
LOOK_SECONDS = 1.0
"""Seconds between two looks."""
HANG_LOOKS = 15
"""Number of looks in a row, one a second, without progress beyond which the engine counts as hung. The longest step of
a healthy engine takes a quarter of a second; a step in which a kernel is compiled takes some seconds."""


class Heartbeat:
    """Tells whether a model's engine makes progress, from the counters that are passed to `heard`."""

    def __init__(self, engine: EngineApi) -> None:
        self._engine = engine
        self._still = StillLooks()
        self._is_told = False
        """True means that the log says that the engine hangs."""

    @property
    def trouble(self) -> str:
        """Message for operators: why the engine cannot serve requests now. Empty means that the engine is healthy."""
        if not self._engine.ready:
            return "the engine is not connected"
        return "the engine is connected but has stopped working" if self._still.count > HANG_LOOKS else ""

    def heard(self, stats: pb.EngineStats) -> None:
        """Process the counters that the engine sent."""
        self._still.hear(stats.steps, is_busy=any(lane.running for lane in stats.lanes))

    def look(self) -> None:
        """Look for progress once; call this every second. Logs if the engine has begun or ceased to count as hung."""
        self._still.look(is_ready=self._engine.ready)
        hung = bool(self._engine.ready and self.trouble)
        if hung != self._is_told:
            self._is_told = hung
            if hung:
                log.error("engine_hung", seconds=self._still.count)
            else:
                log.info("engine_moves_again")


@asynccontextmanager
async def heartbeat_running(heartbeat: Heartbeat, engine: EngineApi) -> AsyncIterator[None]:
    """Poll the engine and pass its counters to `heartbeat`, in background tasks that are cancelled on exit."""
    tasks = [asyncio.create_task(_ask_forever(heartbeat, engine)), asyncio.create_task(_look_forever(heartbeat))]
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
            pass  # the looks count it
        except Exception:
            log.exception("heartbeat_failed")
        await asyncio.sleep(ASK_SECONDS)


async def _look_forever(heartbeat: Heartbeat) -> None:
    """Look every second, also while `_ask_forever` awaits the engine's answer."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        heartbeat.look()
