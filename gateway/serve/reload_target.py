"""Applies a changed configuration to a running gateway process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.core.types import Lane
from engine.rpc.client import EngineClient
from engine.rpc.stream import EngineUnavailable
from gateway.accounts.registry import AccountRegistry
from gateway.adapters.mirror import CONCURRENT_LOADS
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.sources import AdapterSources
from gateway.config.sections import LanesConfig
from gateway.config.whole import Config
from gateway.core.errors import ApiError
from gateway.limiter.failover import FailoverLimiter
from gateway.observe.metrics import Metrics
from gateway.requests.service import Gateway


@dataclass(frozen=True, slots=True)
class ReloadTarget:
    """Applies the sections `adapters`, `lanes`, `limits` and `tenants` to a running gateway, as a restart would."""

    data_dir: Path
    accounts: AccountRegistry
    adapters: AdapterRegistry
    sources: AdapterSources
    engine: EngineClient
    limiter: FailoverLimiter
    gateway: Gateway
    metrics: Metrics

    async def apply(self, config: Config) -> dict[str, str]:
        """Apply a configuration. Returns the adapters that cannot be served, by name, and why; the rest is in force."""
        await self.apply_settings(config)
        return await self.seed(config)

    async def apply_settings(self, config: Config) -> None:
        """Apply the settings that each gateway process keeps itself: limits, adapter sources, timeouts, lane goals."""
        limits, adapters = config.limits, config.adapters
        self.limiter.set_default_policy(limits.when_redis_is_away, limits.replicas, limits.lease_seconds)
        self.sources.allow(adapters, adapter_cache(config, self.data_dir))
        self.adapters.drain_for(adapters.drain_seconds)
        self.engine.load_seconds = adapters.load_timeout_s
        await self._promise(config.lanes)

    async def seed(self, config: Config) -> dict[str, str]:
        """Write the tenants and adapters to the registries, where all gateways find them.

        Returns:
            The adapters that cannot be served, by name, and why.
        """
        for entry in config.tenants.values():
            await self.accounts.seed(entry.tenant, entry.keys)
        return await seed_adapters(self.adapters, config.adapters.preload)

    async def _promise(self, lanes: LanesConfig) -> None:
        self.gateway.lane_capacity = {lane: lanes.of(lane).max_requests for lane in Lane}
        self.metrics.static.goals = {lane: lanes.of(lane).goals() for lane in Lane}
        with suppress(EngineUnavailable):  # the next engine process starts with these goals
            for lane in Lane:
                await self.engine.set_goals(lane, lanes.of(lane).goals())


def adapter_cache(config: Config, data_dir: Path) -> Path:
    """Return the folder for fetched adapters."""
    return config.adapters.cache or data_dir / "fetched"


async def seed_adapters(
    adapters: AdapterRegistry, preload: Mapping[str, Path], one_done: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Serve the adapters that the configuration names, and call `one_done` after each, even if it failed.

    Several adapters load at a time, because reading one keeps a core busy and leaves the disk idle.

    Returns:
        The adapters that cannot be served, by name, and why.
    """
    turns, failed = asyncio.Semaphore(CONCURRENT_LOADS), {}

    async def seed(name: str, path: Path) -> None:
        async with turns:
            try:
                await adapters.seed(name, str(path))
            except ApiError as error:
                failed[name] = error.message
        one_done()

    async with asyncio.TaskGroup() as group:
        for name, path in preload.items():
            group.create_task(seed(name, path))
    return failed
