"""Puts a gateway together and runs it: the composition root of the gateway process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvicorn
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
from gateway.config import Config
from gateway.core.errors import ApiError
from gateway.grpc_api import GrpcServer
from gateway.http_api import create_app
from gateway.latency import LatencyWindow
from gateway.limiter.failover import FailoverLimiter
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter
from gateway.metrics import Metrics
from gateway.observability import open_observers
from gateway.operations import Operations
from gateway.service import Gateway
from gateway.settings import ServiceSettings
from gateway.store import open_store
from gateway.supervisor import EngineSupervisor
from gateway.tokenizer import Tokenizer
from gateway.usage.admin import UsageAdmin
from gateway.usage.books import RedisUsageBooks
from gateway.usage.metrics import UsageMetrics

log = structlog.get_logger("app")

EMBEDDED_NAME = "smollm2-135m-instruct"
ENGINE_START_SECONDS = 600.0
"""Reading tens of gigabytes of weights takes minutes."""


class StartError(Exception):
    """The gateway cannot start; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Where this gateway runs, apart from what its configuration says."""

    config: Config
    model_dir: Path
    """The prepared model."""
    data_dir: Path
    fake_engine: bool = False
    """Serve digests instead of a model (see engine/executor/fake.py)."""


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway that answers."""

    gateway: Gateway
    engine: EngineClient
    supervisor: EngineSupervisor
    limiter: FailoverLimiter
    http_port: int
    grpc_port: int


def model_name(config: Config) -> str:
    """What clients call the base model, unless the configuration says otherwise: the last part of its path or id."""
    if config.model.name:
        return config.model.name
    if config.model.source == "embedded":
        return EMBEDDED_NAME
    return Path(config.model.source).name.removesuffix(".gguf").lower()


async def serve(launch: Launch, console: Console) -> None:
    """Runs until SIGINT or SIGTERM, then lets running requests end."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    async with running(launch, console) as app:
        Banner(launch.config, app.gateway, app.engine.info, app.http_port, app.grpc_port).print(console)
        await stopping.wait()
        console.print("stopping ...")


@asynccontextmanager
async def running(launch: Launch, console: Console) -> AsyncIterator[Running]:
    """A gateway with its store and engine, taken down in the opposite order of how it is built up.

    Raises:
        StartError: something that the configuration names is not there or not usable.
        ConfigError: it asks for what is not installed.
    """
    config = launch.config
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(
            open_store(launch.data_dir, config.redis.url, cluster=config.redis.cluster)
        )
        limiter = _limiter(config, redis)
        stack.push_async_callback(limiter.close)
        seeds = [(entry.tenant, entry.keys) for entry in config.tenants.values()]
        registered = account_store(redis, config.redis.key_prefix)
        accounts = await stack.enter_async_context(open_accounts(registered, config.admins(), limiter.know, seeds))
        supervisor = EngineSupervisor(
            config.engine_config(launch.model_dir, launch.data_dir / "engine"),
            _engine_socket(launch.data_dir),
            fake=launch.fake_engine,
        )
        await stack.enter_async_context(supervisor)
        sources = AdapterSources(config.adapters, config.adapters.cache or launch.data_dir / "fetched")
        stack.callback(sources.close)
        engine, adapters = await _connect(stack, supervisor, redis, config, sources)
        tokenizer = await asyncio.to_thread(Tokenizer.load, launch.model_dir)
        await _wait_for_engine(engine, supervisor, console)
        await _preload(adapters, config, console)
        metrics = Metrics({lane: config.lanes.of(lane).goals() for lane in Lane})
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
        operations = Operations(engine, LatencyWindow(metrics.collect))
        app = create_app(
            gateway,
            accounts,
            metrics=metrics,
            accounts=accounts,
            operations=operations,
            max_body_bytes=config.http.max_body_bytes,
            usage=usage,
        )
        http_port = await stack.enter_async_context(_http(app, config.http.host, config.http.port))
        grpc_port = await stack.enter_async_context(
            _grpc(
                GrpcServer(
                    gateway,
                    accounts,
                    accounts,
                    operations,
                    host=config.grpc.host,
                    port=config.grpc.port,
                    usage=usage,
                )
            )
        )
        yield Running(gateway, engine, supervisor, limiter, http_port, grpc_port)


async def _connect(
    stack: AsyncExitStack, supervisor: EngineSupervisor, redis: Redis, config: Config, sources: AdapterSources
) -> tuple[EngineClient, AdapterRegistry]:
    """A client that gives an engine the registry's adapters before it counts as ready."""
    engine = EngineClient(supervisor.address, load_seconds=config.adapters.load_timeout_s)
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


def _settings(config: Config) -> ServiceSettings:
    return ServiceSettings(
        request_timeout=config.http.request_timeout_s,
        first_token_timeout=config.http.first_token_timeout_s,
        lane_capacity={lane: config.lanes.of(lane).max_requests for lane in Lane},
        tool_parser=config.model.tool_parser,
    )


def _engine_socket(data_dir: Path) -> Path:
    """In the temporary folder: socket paths are short, data directories may be deep."""
    digest = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"loralane-engine-{digest}-{os.getpid()}.sock"


def _limiter(config: Config, redis: Redis) -> FailoverLimiter:
    shared = RedisLimiter(
        redis,
        timeout=config.redis.timeout_ms / 1000,
        lease_seconds=config.limits.lease_seconds,
        prefix=config.redis.key_prefix,
        retention_days=config.billing.retention_days,
    )
    return FailoverLimiter(shared, LocalLimiter(config.limits.replicas), config.limits.when_redis_is_away)


async def _wait_for_engine(engine: EngineClient, supervisor: EngineSupervisor, console: Console) -> None:
    """An engine that dies before it was ever ready will not get better by itself."""
    ready = asyncio.create_task(engine.wait_ready())
    died = asyncio.create_task(supervisor.wait_first_exit())
    with console.status("starting the engine: loading weights"):
        await asyncio.wait({ready, died}, timeout=ENGINE_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    died.cancel()
    if not engine.ready:
        ready.cancel()
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


@asynccontextmanager
async def _grpc(server: GrpcServer) -> AsyncIterator[int]:
    try:
        port = await server.start()
    except OSError as error:
        raise StartError(str(error)) from error
    try:
        yield port
    finally:
        await server.stop()


@asynccontextmanager
async def _http(app: ASGIApp, host: str, port: int) -> AsyncIterator[int]:
    """uvicorn on a socket of ours, so that a port in use is our error and port 0 is known at once. Yields the port."""
    listener = _bind(host, port)
    server = _Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=10))
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """Leaves signals to `serve`: uvicorn's own handlers would end the process before the engine is stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}; use another port") from error
    return listener


def configure_logging() -> None:
    """JSON lines on standard error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
