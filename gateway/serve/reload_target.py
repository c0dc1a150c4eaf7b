"""Applies a changed configuration to a running gateway process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.core.types import Lane
from engine.rpc.stream import EngineUnavailable
from gateway.accounts.registry import AccountRegistry
from gateway.adapters.mirror import CONCURRENT_LOADS
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.sources import AdapterSources
from gateway.config.sections import LanesConfig
from gateway.config.whole import Config
from gateway.core.errors import ApiError
from gateway.engines.pool import EnginePool
from gateway.limiter.failover import FailoverLimiter
from gateway.observe.metrics import Metrics
from gateway.requests.service import Gateway


@dataclass(frozen=True, slots=True)
class ReloadTarget:
    """The parts of a running gateway process to which a reload applies the configuration sections `adapters`, `lanes`,
    `limits` and `tenants`."""

    data_dir: Path
    accounts: AccountRegistry
    adapters: AdapterRegistry
    sources: AdapterSources
    engine: EnginePool
    limiter: FailoverLimiter
    gateway: Gateway
    metrics: Metrics

    async def apply(self, config: Config) -> dict[str, str]:
        """Apply a configuration: first `apply_settings`, then `seed`. Returns adapter -> reason for adapters that
        cannot be served; everything else is in force."""
        await self.apply_settings(config)
        return await self.seed(config)

    async def apply_settings(self, config: Config) -> None:
        """Apply the settings that each gateway process holds itself: the limiter's, the adapters' sources, drain time
        and load timeout, and the lanes' capacities and goals, which are also sent to the engine."""
        limits, adapters = config.limits, config.adapters
        self.limiter.set_default_policy(limits.when_redis_is_away, limits.replicas, limits.lease_seconds)
        self.sources.allow(adapters, adapter_cache(config, self.data_dir))
        self.adapters.drain_for(adapters.drain_seconds)
        self.engine.load_seconds = adapters.load_timeout_s
        await self._promise(config.lanes)

    async def seed(self, config: Config) -> dict[str, str]:
        """Write the configured tenants, keys and adapters to the registries, where all gateways find them. Returns
        adapter -> reason for adapters that cannot be served."""
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
    """Return the folder for adapters fetched from a hub or URL: the configured one, or `fetched` in the data
    directory."""
    return config.adapters.cache or data_dir / "fetched"


async def seed_adapters(
    adapters: AdapterRegistry, preload: Mapping[str, Path], one_done: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Load the adapters `preload` (folders by name), several at a time, and call `one_done` after each, even if it
    failed. Returns adapter -> reason for adapters that cannot be served."""
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
