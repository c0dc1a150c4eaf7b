"""Samples the engines at a fixed interval for the history charts of the console."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from gateway.api_schema.engines import EngineStatus
from gateway.core.errors import ApiError
from gateway.observe.history import FINE_SECONDS
from gateway.observe.model_operations import ModelOperations
from gateway.observe.operations import Operations

log = structlog.get_logger("gateway")


class HistorySampler:
    """Adds points to the console's history. It stores the engine's counters of the last sample to compute rates."""

    def __init__(self, operations: ModelOperations) -> None:
        self._operations = operations
        self._before: tuple[float, EngineStatus] | None = None

    async def sample(self, now: float) -> None:
        """Query the engine and add one point to the history: token rates since the last sample, pages, depths of the
        lanes, latencies. `now` is a monotonic time in seconds. Raises ApiError: ENGINE_UNAVAILABLE."""
        try:
            engine, lanes = await asyncio.gather(self._operations.engine(), self._operations.lanes())
        except ApiError:
            self._before = None  # the counters of the next engine process begin at zero
            raise
        rates = {
            "tokens_per_second": self._rate(now, engine, "generated_tokens"),
            "prompt_tokens_per_second": self._rate(now, engine, "prompt_tokens"),
        }
        self._before = now, engine
        pages = {f"{kind}_pages": getattr(engine, f"{kind}_pages") for kind in ("kv", "cached", "adapter", "free")}
        depths = {f"{lane.lane}.{name}": getattr(lane, name) for lane in lanes for name in ("running", "waiting")}
        self._operations.history.add({**rates, **pages, **depths, **self._operations.latencies_at_goal()})

    def _rate(self, now: float, engine: EngineStatus, counter: str) -> float | None:
        """Return the growth of the engine's `counter` per second since the last sample. None means that there is no
        last sample, that no time has passed, or that the counter fell because the engine restarted."""
        if self._before is None:
            return None
        since, before = self._before
        grown = getattr(engine, counter) - getattr(before, counter)
        return grown / (now - since) if grown >= 0 and now > since else None


@asynccontextmanager
async def sampling(operations: Operations) -> AsyncIterator[None]:
    """Add a point to each base model's history every FINE_SECONDS, in tasks, until the block ends; none while the
    model's engine is away."""
    tasks = [asyncio.create_task(_sample_forever(HistorySampler(model))) for model in operations]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _sample_forever(sampler: HistorySampler) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        try:
            await sampler.sample(clock())
        except ApiError:
            pass
        except Exception:
            log.exception("history_sample_failed")
        await asyncio.sleep(FINE_SECONDS)
