"""Puts a gateway together and runs it: the composition root of the gateway process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis
from rich.console import Console
from rich.progress import Progress
from starlette.types import ASGIApp

from engine.client import EngineClient
from engine.core.types import Lane
from gateway.accounts.registry import open_accounts
from gateway.accounts.store import account_store
from gateway.adapters.mirror import CONCURRENT_LOADS
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.sources import AdapterSources
from gateway.adapters.store import RedisAdapterStore
from gateway.banner import Banner
from gateway.batches.service import Batches
from gateway.batches.store import BatchStore
from gateway.batches.strays import StraySweeper
from gateway.batches.webhooks.opened import open_webhooks
from gateway.batches.workers import working
from gateway.config import Config
from gateway.core.errors import ApiError
from gateway.files.registry import FileRegistry
from gateway.files.service import FileLimits, Files
from gateway.files.storage import open_storage
from gateway.files.sweeper import Sweeper, sweeping
from gateway.grpc_api import GrpcServer
from gateway.http_api import create_app
from gateway.latency import LatencyWindow
from gateway.launch import Ground, Launch, StartError, grounded, model_name
from gateway.limiter.failover import FailoverLimiter
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter
from gateway.listeners import grpc_port, http_port
from gateway.loop_metrics import LoopMetrics
from gateway.metrics import Metrics
from gateway.observability import open_observers
from gateway.operations import Operations
from gateway.process import settle_memory, told_to_stop
from gateway.service import Gateway
from gateway.settings import ServiceSettings
from gateway.store import connected
from gateway.supervisor import EngineSupervisor
from gateway.tokenizer import Tokenizer
from gateway.usage.admin import UsageAdmin
from gateway.usage.books import RedisUsageBooks
from gateway.usage.metrics import UsageMetrics

ENGINE_START_SECONDS = 600.0
"""Reading tens of gigabytes of weights takes minutes."""


@dataclass(frozen=True, slots=True)
class Built:
    """A gateway that could answer, if it listened."""

    config: Config
    gateway: Gateway
    engine: EngineClient
    limiter: FailoverLimiter
    http: ASGIApp
    grpc: GrpcServer

    def banner(self, http_port: int, grpc_port: int) -> Banner:
        return Banner(self.config, self.gateway, self.engine.info, http_port, grpc_port)


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway that answers, with an engine of its own."""

    gateway: Gateway
    engine: EngineClient
    supervisor: EngineSupervisor
    limiter: FailoverLimiter
    http_port: int
    grpc_port: int
    banner: Banner


async def serve(launch: Launch, console: Console) -> None:
    """Runs until SIGINT or SIGTERM, then lets running requests end."""
    stopping = told_to_stop()
    async with running(launch, console) as app:
        settle_memory()
        app.banner.print(console)
        await stopping.wait()
        console.print("stopping ...")


@asynccontextmanager
async def running(launch: Launch, console: Console) -> AsyncIterator[Running]:
    """A gateway with its store and engine, taken down in the opposite order of how it is built up.

    Raises:
        StartError: something that the configuration names is not there or not usable.
        ConfigError: it asks for what is not installed.
    """
    async with (
        grounded(launch) as (ground, supervisor),
        built(launch, ground, console, supervisor) as app,
        listening(app) as (http, grpc),
    ):
        yield Running(app.gateway, app.engine, supervisor, app.limiter, http, grpc, app.banner(http, grpc))


@asynccontextmanager
async def listening(app: Built, *, shared: bool = False) -> AsyncIterator[tuple[int, int]]:
    """Yields the ports of HTTP and gRPC. `shared`: with other processes. Raises StartError."""
    http = app.config.http
    async with http_port(app.http, http.host, http.port, shared=shared) as number, grpc_port(app.grpc) as grpc_number:
        yield number, grpc_number


@asynccontextmanager
async def built(
    launch: Launch, ground: Ground, console: Console, supervisor: EngineSupervisor | None = None
) -> AsyncIterator[Built]:
    """A gateway over a store and an engine that are there, or about to be.

    `supervisor`: of the engine, where this process started it: one that dies before it was ready will not get better.

    Raises:
        StartError: something that the configuration names is not there or not usable.
    """
    config = launch.config
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(connected(ground.store, cluster=config.redis.cluster))
        limiter = _limiter(config, redis)
        stack.push_async_callback(limiter.close)
        seeds = [(entry.tenant, entry.keys) for entry in config.tenants.values()]
        registered = account_store(redis, config.redis.key_prefix)
        accounts = await stack.enter_async_context(open_accounts(registered, config.admins(), limiter.know, seeds))
        sources = AdapterSources(config.adapters, config.adapters.cache or launch.data_dir / "fetched")
        stack.callback(sources.close)
        engine, adapters = await _connect(stack, ground.engine, redis, config, sources)
        tokenizer = await asyncio.to_thread(Tokenizer.load, launch.model_dir)
        await _wait_for_engine(engine, supervisor, console)
        await _preload(adapters, config, console)
        metrics = Metrics({lane: config.lanes.of(lane).goals() for lane in Lane}, ground.metrics)
        observers = await stack.enter_async_context(open_observers(config.observability))
        gateway = Gateway(
            engine,
            tokenizer,
            adapters,
            limiter,
            base_names=(model_name(config),),
            settings=_settings(config),
            observers=(metrics, *observers),
        )
        stack.push_async_callback(gateway.close)
        usage = UsageAdmin(RedisUsageBooks(redis, prefix=config.redis.key_prefix), config.billing)
        metrics.register(UsageMetrics(limiter))
        metrics.register(LoopMetrics(asyncio.get_running_loop()))
        endpoints = config.batches.webhooks if config.batches.workers else {}
        await stack.enter_async_context(open_webhooks(redis, config.redis.key_prefix, endpoints, metrics))
        operations = Operations(engine, LatencyWindow(metrics.collect))
        files = await stack.enter_async_context(_files(launch, redis))
        batch_store = _batch_store(config, redis)
        await stack.enter_async_context(sweeping(StraySweeper(files.storage, batch_store).sweep))
        if config.batches.workers:
            await stack.enter_async_context(working(batch_store, files, gateway, accounts, metrics, config))
        app = create_app(
            gateway,
            accounts,
            metrics=metrics,
            accounts=accounts,
            operations=operations,
            max_body_bytes=config.http.max_body_bytes,
            metrics_keys=None if config.admin.open_metrics else config.admin.metrics_keys,
            usage=usage,
            files=files,
            batches=Batches(batch_store, files, config.batches.tenant_jobs),
        )
        grpc = GrpcServer(
            gateway,
            accounts,
            accounts,
            operations,
            host=config.grpc.host,
            port=config.grpc.port,
            shared=ground.metrics is not None,
            usage=usage,
        )
        yield Built(config, gateway, engine, limiter, app, grpc)


async def _connect(
    stack: AsyncExitStack, address: str, redis: Redis, config: Config, sources: AdapterSources
) -> tuple[EngineClient, AdapterRegistry]:
    """A client that gives an engine the registry's adapters before it counts as ready."""
    engine = EngineClient(address, load_seconds=config.adapters.load_timeout_s)
    base = model_name(config)
    adapters = AdapterRegistry(
        engine,
        RedisAdapterStore(redis, base, config.redis.key_prefix),
        sources,
        reserved=(base,),
        drain_seconds=config.adapters.drain_seconds,
    )
    await adapters.start()
    engine.on_connect = adapters.restore
    await engine.start()
    stack.push_async_callback(engine.close)
    stack.push_async_callback(adapters.close)
    return engine, adapters


@asynccontextmanager
async def _files(launch: Launch, redis: Redis) -> AsyncIterator[Files]:
    """Raises ConfigError."""
    config = launch.config.batches
    with closing(open_storage(config.storage, launch.data_dir)) as storage:
        registry = FileRegistry(redis, prefix=launch.config.redis.key_prefix)
        async with sweeping(Sweeper(storage, registry).sweep):
            yield Files(storage, registry, FileLimits(config.max_file_bytes, config.tenant_bytes, config.tenant_files))


def _batch_store(config: Config, redis: Redis) -> BatchStore:
    return BatchStore(
        redis,
        lease_seconds=config.batches.lease_s,
        retention_seconds=config.batches.retention_days * 86_400,
        prefix=config.redis.key_prefix,
        told=config.batches.webhooks,
    )


def _settings(config: Config) -> ServiceSettings:
    return ServiceSettings(
        request_timeout=config.http.request_timeout_s,
        first_token_timeout=config.http.first_token_timeout_s,
        lane_capacity={lane: config.lanes.of(lane).max_requests for lane in Lane},
        tool_parser=config.model.tool_parser,
    )


def _limiter(config: Config, redis: Redis) -> FailoverLimiter:
    shared = RedisLimiter(
        redis,
        timeout=config.redis.timeout_ms / 1000,
        lease_seconds=config.limits.lease_seconds,
        prefix=config.redis.key_prefix,
        retention_days=config.billing.retention_days,
    )
    limits = config.limits
    return FailoverLimiter(shared, LocalLimiter(limits.replicas, policy=limits.when_redis_is_away))


async def _wait_for_engine(engine: EngineClient, supervisor: EngineSupervisor | None, console: Console) -> None:
    """Raises StartError: it has died, or is not ready in time."""
    waiting = [asyncio.create_task(engine.wait_ready())]
    waiting += [asyncio.create_task(supervisor.wait_first_exit())] if supervisor else []
    with console.status("starting the engine: loading weights"):
        await asyncio.wait(waiting, timeout=ENGINE_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    if not engine.ready:
        raise StartError("the engine did not start; its last words are above")


async def _preload(adapters: AdapterRegistry, config: Config, console: Console) -> None:
    """Several at a time: reading one keeps a core busy, and the disk waiting."""
    turns = asyncio.Semaphore(CONCURRENT_LOADS)

    async def seed(name: str, path: Path) -> None:
        async with turns:
            try:
                await adapters.seed(name, str(path))
            except ApiError as error:
                raise StartError(f"adapter {name}: {error.message}") from error
        progress.advance(task)

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("loading adapters", total=len(config.adapters.preload))
        try:
            async with asyncio.TaskGroup() as group:
                for name, path in config.adapters.preload.items():
                    group.create_task(seed(name, path))
        except* StartError as errors:
            raise errors.exceptions[0] from None
