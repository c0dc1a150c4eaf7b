"""Applies a changed configuration to a running gateway process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from engine.core.config import LaneGoals
from engine.core.messages.requests import Lane
from engine.rpc.stream import EngineUnavailable
from gateway.accounts.record import KeyOwner
from gateway.accounts.registry import AccountRegistry, Seed
from gateway.adapters.mirror import CONCURRENT_LOADS
from gateway.adapters.sources import AdapterSources
from gateway.config.lanes import LanesConfig
from gateway.config.sections import AdaptersConfig, TenantConfig
from gateway.config.whole import Config
from gateway.core.errors import ApiError
from gateway.engines.pool import EnginePool
from gateway.limiter.failover import FailoverLimiter
from gateway.observe.metrics import Metrics
from gateway.requests.served_model import ServedModel, ServedModels


@dataclass(frozen=True, slots=True)
class ReloadTarget:
    """The parts of a running gateway process to which a reload applies the configuration sections `adapters`, `lanes`,
    `limits` and `tenants`."""

    data_dir: Path
    accounts: AccountRegistry
    sources: AdapterSources
    engines: Mapping[str, EnginePool]
    """The engines of each base model, by the model's name."""
    limiter: FailoverLimiter
    models: ServedModels
    metrics: Metrics

    async def apply(self, config: Config) -> dict[str, str]:
        """Apply a configuration: first `apply_settings`, then `seed`. Returns adapter -> reason for adapters that
        cannot be served; everything else is in force."""
        await self.apply_settings(config)
        return await self.seed(config)

    async def apply_settings(self, config: Config) -> None:
        """Apply the settings that each gateway process holds itself: the limiter's, the adapters' sources, drain time
        and load timeout, which adapters are configured, and the lanes' capacities and goals, which are also sent to the
        engines."""
        limits = config.limits
        self.limiter.set_default_policy(limits.when_redis_is_away, limits.replicas, limits.lease_seconds)
        self.sources.allow(adapter_sources(config), adapter_cache(config, self.data_dir))
        self.metrics.static.goals = goals_of(config)
        for model in self.models:
            _configure(model, config)
            model.adapters.drain_for(config.adapters.drain_seconds)
            self.engines[model.name].load_seconds = config.adapters.load_timeout_s
            await _promise(model, config.served[model.name].lanes)

    async def seed(self, config: Config) -> dict[str, str]:
        """Write the configured tenants, keys and adapters to the registries, where all gateways find them. Returns
        adapter -> reason for adapters that cannot be served."""
        for entry in config.tenants.values():
            await self.accounts.seed(*tenant_seed(entry))
        failed, refused = await seed_adapters(self.models, config)
        return failed | refused


def tenant_seed(entry: TenantConfig) -> Seed:
    """Return a configured tenant as the registry of accounts takes it."""
    described = {
        known: KeyOwner(entry.tenant.name, said.label, rules=said.rules) for known, said in entry.described.items()
    }
    return entry.tenant, entry.keys, described


def _configure(model: ServedModel, config: Config) -> None:
    """Tell the adapters of a base model what the configuration lists."""
    sources = {name: str(path) for name, path in config.served[model.name].preload.items()}
    templates = {name: file for name, file in config.adapters.chat_templates.items() if name in sources}
    model.adapters.configure(sources, templates)


async def _promise(model: ServedModel, lanes: LanesConfig) -> None:
    model.lane_capacity = lanes.capacity()
    with suppress(EngineUnavailable):  # the next engine process starts with these goals
        for lane, goals in lanes.goals().items():
            await model.engine.set_goals(lane, goals)


def goals_of(config: Config) -> dict[str, dict[Lane, LaneGoals]]:
    """Return the goals of the lanes of each base model, by the model's name."""
    return {name: settings.lanes.goals() for name, settings in config.served.items()}


def adapter_sources(config: Config) -> AdaptersConfig:
    """Return the configuration section `adapters`, extended by the preloaded adapters of all base models, so that their
    folders are allowed sources."""
    return replace(config.adapters, preload=config.preloaded())


def adapter_cache(config: Config, data_dir: Path) -> Path:
    """Return the folder for adapters fetched from a hub or URL: the configured one, or `fetched` in the data
    directory."""
    return config.adapters.cache or data_dir / "fetched"


class Seeded(NamedTuple):
    """Why configured adapters are not served, by their names: those that `failed` to load are listed with their error
    and tried again, and those that were `refused` cannot have their name."""

    failed: dict[str, str]
    refused: dict[str, str]


async def seed_adapters(models: ServedModels, config: Config, one_done: Callable[[], None] = lambda: None) -> Seeded:
    """Load the configured adapters of all base models, several at a time, and call `one_done` after each, even if it
    failed. Returns those that are not served."""
    turns, failed, refused = asyncio.Semaphore(CONCURRENT_LOADS), dict[str, str](), dict[str, str]()

    async def seed(model: ServedModel, name: str, path: Path) -> None:
        async with turns:
            try:
                reason = await model.adapters.seed(name, str(path))
            except ApiError as error:
                refused[name] = error.message
            else:
                if reason:
                    failed[name] = reason
        one_done()

    async with asyncio.TaskGroup() as group:
        for model in models:
            _configure(model, config)
            for name, path in config.served[model.name].preload.items():
                group.create_task(seed(model, name, path))
    return Seeded(failed, refused)
