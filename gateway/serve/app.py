"""Assembles a gateway from its parts: the composition root of the gateway process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass

from redis.asyncio import Redis

from engine.grammar_check.pool import UNHURRIED_S, GrammarPool
from gateway.accounts.last_use import LastUse, RedisLastUse
from gateway.accounts.record import account_store
from gateway.accounts.registry import AccountRegistry, open_accounts
from gateway.adapters.sources import AdapterSources
from gateway.administration.trail import recording_seeds
from gateway.audit.log import AuditLog
from gateway.audit.store import RedisAuditStore, Retention
from gateway.batches.eta import EtaEstimator
from gateway.batches.setup import open_batches
from gateway.config.whole import Config
from gateway.core.networks import parse_networks
from gateway.core.space import Disk
from gateway.engines.pool import EnginePool
from gateway.limiter.failover import FailoverLimiter
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter
from gateway.observe.latency import LatencyWindow
from gateway.observe.metrics import Metrics
from gateway.observe.model_operations import ModelOperations
from gateway.observe.operations import Operations
from gateway.observe.process_metrics import DiskMetrics, GrammarMetrics, LoopMetrics, UsageMetrics
from gateway.observe.setup import open_observers
from gateway.redis.connect import redis_client
from gateway.registry.gateways import gateway_directory
from gateway.requests.heartbeat import heartbeat_running
from gateway.requests.service import Gateway
from gateway.responses.service import Responses
from gateway.responses.store import DAY, ResponseStore, StoreLimits
from gateway.serve.addresses import Ports
from gateway.serve.backends import Backends
from gateway.serve.banner import Banner
from gateway.serve.endpoints import EndpointServers, endpoint_servers
from gateway.serve.engine_group import EngineGroup
from gateway.serve.launch import Launch
from gateway.serve.memory import memory_kept_low
from gateway.serve.models import (
    ModelRoom,
    open_models,
    preload,
    service_settings,
    wait_for_engines,
    warn_of_missing_rows,
)
from gateway.serve.reload_target import ReloadTarget, adapter_cache, adapter_sources, goals_of, tenant_seed
from gateway.serve.sampling import sampling
from gateway.serve.start_bar import StartBar
from gateway.serve.virtual_models import route_table
from gateway.services import Services
from gateway.upstreams.client import open_upstreams
from gateway.usage.books import RedisUsageBooks
from gateway.usage.report import UsageAdmin


@dataclass(frozen=True, slots=True)
class BuiltGateway:
    """A gateway that is ready to answer requests and does not listen on its ports yet."""

    config: Config
    gateway: Gateway
    engines: Mapping[str, EnginePool]
    """The engines of each base model, by the model's name."""
    limiter: FailoverLimiter
    servers: tuple[EndpointServers, ...]
    """The first serves tenants; the second, if any, administration."""
    reload_target: ReloadTarget

    def banner(self, ports: Sequence[Ports]) -> Banner:
        """Return the banner to print. `ports` are the ports of each endpoint, in order."""
        return Banner(self.config, self.gateway, ports)


@asynccontextmanager
async def built_gateway(
    launch: Launch, backends: Backends, bar: StartBar, group: EngineGroup | None = None
) -> AsyncIterator[BuiltGateway]:
    """Connect a gateway to a running store and to engines that run or start, wait until the engines are ready, and load
    the configured tenants and adapters; yields the gateway, and closes it when the block ends.

    Args:
        backends: addresses of the store and the engines, and the folders of the models.
        bar: shows the progress of the start.
        group: the engines' supervisors, if this process started the engines. If one dies before they are ready, the
            start fails at once, because a second attempt would fail too.

    Raises:
        StartError: an engine does not become ready, or an adapter or a chat template cannot be used.
        ConfigError: a certificate is missing or not usable, or a package that the configuration needs is not installed.
    """
    config = launch.config
    async with AsyncExitStack() as stack:
        grammars = stack.enter_context(closing(GrammarPool(start_after=UNHURRIED_S)))
        redis = await stack.enter_async_context(redis_client(backends.store, cluster=config.redis.cluster))
        limiter = await _open_limiter(stack, config, redis)
        audit = AuditLog(
            RedisAuditStore(redis, Retention(config.audit.days, config.audit.entries), config.redis.key_prefix)
        )
        accounts = await _open_accounts(stack, config, redis, limiter, audit)
        sources = AdapterSources(adapter_sources(config), adapter_cache(config, launch.data_dir))
        stack.callback(sources.close)
        room = await open_models(stack, config, backends, redis, sources, grammars)
        await wait_for_engines(room.engines, backends, group)
        for model in room.models:
            warn_of_missing_rows(model)
        await preload(room.models, config, bar)
        metrics = Metrics(goals_of(config), backends.metrics)
        operations = _operations(room, metrics)
        gateway = await _open_gateway(stack, config, limiter, room, metrics, operations)
        disk = Disk.of_store(launch.data_dir)
        loop_metrics = LoopMetrics(asyncio.get_running_loop())
        for further in (UsageMetrics(limiter), loop_metrics, GrammarMetrics(grammars), DiskMetrics(disk)):
            metrics.register(further)
        await stack.enter_async_context(sampling(operations))
        services = await _open_services(stack, launch, redis, gateway, accounts, audit, metrics, operations, disk)
        reload_target = ReloadTarget(launch.data_dir, accounts, sources, room.engines, limiter, room.models, metrics)
        servers = endpoint_servers(services, config, shared=backends.metrics is not None)
        yield BuiltGateway(config, gateway, room.engines, limiter, servers, reload_target)


async def _open_limiter(stack: AsyncExitStack, config: Config, redis: Redis) -> FailoverLimiter:
    limits = config.limits
    shared = RedisLimiter(
        redis,
        timeout=config.redis.timeout_ms / 1000,
        lease_seconds=limits.lease_seconds,
        prefix=config.redis.key_prefix,
        retention_days=config.billing.retention_days,
    )
    limiter = FailoverLimiter(shared, LocalLimiter(limits.replicas, policy=limits.when_redis_is_away))
    stack.push_async_callback(limiter.close)
    await limiter.warning()
    return limiter


async def _open_accounts(
    stack: AsyncExitStack, config: Config, redis: Redis, limiter: FailoverLimiter, audit: AuditLog
) -> AccountRegistry:
    prefix = config.redis.key_prefix
    opening = open_accounts(
        account_store(redis, prefix),
        limiter.configure_lazily,
        list(map(tenant_seed, config.tenants.values())),
        config.admin.seeds(),
        seeded=recording_seeds(audit),
        refused=config.foreign_demo_keys(),
        last_use=LastUse(RedisLastUse(redis, prefix)),
        proxies=parse_networks(config.http.trusted_proxies),
    )
    return await stack.enter_async_context(opening)


def _operations(room: ModelRoom, metrics: Metrics) -> Operations:
    window = LatencyWindow(metrics.collect)
    models = [ModelOperations(one.name, room.engines[one.name], window, metrics.static) for one in room.models]
    return Operations(models, room.members)


async def _open_gateway(
    stack: AsyncExitStack,
    config: Config,
    limiter: FailoverLimiter,
    room: ModelRoom,
    metrics: Metrics,
    operations: Operations,
) -> Gateway:
    """Return the gateway, which serves from now on; its readiness and its use of memory are watched."""
    observers = await stack.enter_async_context(open_observers(config.observability))
    upstreams = await stack.enter_async_context(open_upstreams(config.upstreams))
    gateway = Gateway(
        room.models,
        room.adapters,
        limiter,
        settings=service_settings(config),
        observers=(metrics, operations.recent, *observers),
        routes=route_table(config, room.engines, upstreams, metrics),
    )
    stack.push_async_callback(gateway.close)
    for model in room.models:
        await stack.enter_async_context(heartbeat_running(model.heartbeat, model.engine))
    await stack.enter_async_context(memory_kept_low())
    return gateway


async def _open_services(
    stack: AsyncExitStack,
    launch: Launch,
    redis: Redis,
    gateway: Gateway,
    accounts: AccountRegistry,
    audit: AuditLog,
    metrics: Metrics,
    operations: Operations,
    disk: Disk,
) -> Services:
    """Return what the ports of the gateway expose. Batches and stored responses count against `disk` if Redis is the
    store on it."""
    config = launch.config
    stores_on = None if config.redis.url else disk
    usage = UsageAdmin(RedisUsageBooks(redis, prefix=config.redis.key_prefix), config.pricing, accounts.counts_as)
    responses = _responses(config, redis, stores_on)
    opening = open_batches(redis, launch.data_dir, config, gateway, accounts, metrics, responses, stores_on)
    files, batches = await stack.enter_async_context(opening)
    prefix = config.redis.key_prefix
    telling = gateway_directory(redis, gateway.lifecycle, lambda: len(gateway.live), prefix)
    return Services(
        gateway=gateway,
        gateways=await stack.enter_async_context(telling),
        accounts=accounts,
        audit=audit,
        metrics=metrics,
        operations=operations,
        usage=usage,
        files=files,
        batches=batches,
        etas=EtaEstimator(batches, gateway),
        responses=responses,
    )


def _responses(config: Config, redis: Redis, disk: Disk | None) -> Responses:
    settings = config.responses
    limits = StoreLimits(settings.keep_days * DAY, settings.tenant_bytes)
    return Responses(ResponseStore(redis, limits, prefix=config.redis.key_prefix), settings.store, disk)
