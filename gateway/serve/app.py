"""Assembles a gateway from its parts: the composition root of the gateway process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path

import structlog
from redis.asyncio import Redis

from engine.grammar_check.pool import UNHURRIED_S, GrammarPool
from engine.process.generation_config import read_sampling_defaults
from engine.rpc.target import UNIX
from gateway.accounts.record import account_store
from gateway.accounts.registry import open_accounts
from gateway.adapters.admin import AdapterAdmin
from gateway.adapters.names import NameLocks
from gateway.adapters.own_text import comparison_with
from gateway.adapters.record import adapter_store
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.sources import AdapterSources
from gateway.batches.eta import EtaEstimator
from gateway.batches.setup import open_batches
from gateway.config.models import ModelConfig
from gateway.config.routes import virtual_names
from gateway.config.whole import Config
from gateway.core.space import Disk
from gateway.engines.directory import engine_directory
from gateway.engines.member import member_store
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
from gateway.requests.heartbeat import heartbeat_running
from gateway.requests.served_model import ServedModel, ServedModels
from gateway.requests.service import Gateway
from gateway.requests.settings import ServiceSettings
from gateway.responses.service import Responses
from gateway.responses.store import DAY, ResponseStore, StoreLimits
from gateway.routing.news import Role
from gateway.routing.split import SplitMode
from gateway.serve.addresses import Ports
from gateway.serve.backends import Backends, ModelPlace
from gateway.serve.banner import Banner
from gateway.serve.endpoints import EndpointServers, endpoint_servers
from gateway.serve.engine_group import EngineGroup
from gateway.serve.launch import Launch, StartError
from gateway.serve.memory import memory_kept_low
from gateway.serve.reload_target import ReloadTarget, adapter_cache, adapter_sources, goals_of, seed_adapters
from gateway.serve.routes import route_table
from gateway.serve.sampling import sampling
from gateway.serve.start_bar import StartBar, StartStage
from gateway.services import Services
from gateway.text.tokenizer import Tokenizer
from gateway.upstreams.client import open_upstreams
from gateway.usage.books import RedisUsageBooks
from gateway.usage.report import UsageAdmin

ENGINE_START_SECONDS = 600.0
"""Seconds that the engine may take to become ready. Reading tens of gigabytes of weights takes minutes."""
MOST_NAMED_TOKENS = 8
"""Maximum number of tokens that a warning names."""

log = structlog.get_logger("serve")


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
        limiter = _limiter(config, redis)
        stack.push_async_callback(limiter.close)
        await limiter.warning()
        seeds = [(entry.tenant, entry.keys) for entry in config.tenants.values()]
        registered = account_store(redis, config.redis.key_prefix)
        opening_accounts = open_accounts(registered, config.admins(), limiter.configure_lazily, seeds)
        accounts = await stack.enter_async_context(opening_accounts)
        sources = AdapterSources(adapter_sources(config), adapter_cache(config, launch.data_dir))
        stack.callback(sources.close)
        connect = _Connecting(stack, redis, config, sources).connect
        connected = {name: await connect(name, place) for name, place in backends.models.items()}
        engines = {name: engine for name, (engine, _) in connected.items()}
        origins = {name: settings.model.source for name, settings in config.served.items()}
        registries = [registry for _, registry in connected.values()]
        adapters = AdapterAdmin(registries, sources, origins, NameLocks(redis, config.redis.key_prefix))
        models = ServedModels(
            [await _served_model(config, name, backends.models[name], *connected[name], grammars) for name in engines]
        )
        directory = engine_directory(member_store(redis, config.redis.key_prefix), engines, config.engine_tls)
        members = await stack.enter_async_context(directory)
        await _wait_for_engines(engines, backends, group)
        for model in models:
            _warn_of_missing_rows(model)
        await _preload(models, config, bar)
        metrics = Metrics(goals_of(config), backends.metrics)
        window = LatencyWindow(metrics.collect)
        operations = Operations(
            [ModelOperations(one.name, engines[one.name], window, metrics.static) for one in models], members
        )
        observers = await stack.enter_async_context(open_observers(config.observability))
        upstreams = await stack.enter_async_context(open_upstreams(config.upstreams))
        gateway = Gateway(
            models,
            adapters,
            limiter,
            settings=_settings(config),
            observers=(metrics, operations.recent, *observers),
            routes=route_table(config, engines, upstreams, metrics),
        )
        stack.push_async_callback(gateway.close)
        for model in models:
            await stack.enter_async_context(heartbeat_running(model.heartbeat, model.engine))
        await stack.enter_async_context(memory_kept_low())
        usage = UsageAdmin(RedisUsageBooks(redis, prefix=config.redis.key_prefix), config.pricing, accounts.counts_as)
        disk = Disk.of_store(launch.data_dir)
        loop_metrics = LoopMetrics(asyncio.get_running_loop())
        for further in (UsageMetrics(limiter), loop_metrics, GrammarMetrics(grammars), DiskMetrics(disk)):
            metrics.register(further)
        await stack.enter_async_context(sampling(operations))
        stores_on = None if config.redis.url else disk
        responses = _responses(config, redis, stores_on)
        opening = open_batches(redis, launch.data_dir, config, gateway, accounts, metrics, responses, stores_on)
        files, batches = await stack.enter_async_context(opening)
        services = Services(
            gateway=gateway,
            accounts=accounts,
            metrics=metrics,
            operations=operations,
            usage=usage,
            files=files,
            batches=batches,
            etas=EtaEstimator(batches, gateway),
            responses=responses,
        )
        reload_target = ReloadTarget(launch.data_dir, accounts, sources, engines, limiter, models, metrics)
        servers = endpoint_servers(services, config, shared=backends.metrics is not None)
        yield BuiltGateway(config, gateway, engines, limiter, servers, reload_target)


@dataclass(frozen=True, slots=True)
class _Connecting:
    """Connects base models to their engines, with the Redis and configuration that all models share. Closing `stack`
    closes the pools and adapter registries."""

    stack: AsyncExitStack
    redis: Redis
    config: Config
    sources: AdapterSources

    async def connect(self, name: str, place: ModelPlace) -> tuple[EnginePool, AdapterRegistry]:
        """Start the adapter registry of the base model `name` and a pool of its engines; returns both. Each engine gets
        the registry's adapters before it gets requests."""
        config = self.config
        engines = config.served[name].engines
        engine = EnginePool(load_seconds=config.adapters.load_timeout_s, split=SplitMode(engines.split))
        adapters = AdapterRegistry(
            engine,
            adapter_store(self.redis, name, config.redis.key_prefix),
            self.sources,
            base_names=(name,),
            virtual_names=virtual_names(config.routes, config.served, name),
            drain_seconds=config.adapters.drain_seconds,
            compare=comparison_with(place.folder, config.served[name].model.chat_template),
        )
        await adapters.start()
        engine.on_first = adapters.restore
        await engine.start()
        self.stack.push_async_callback(engine.close)
        self.stack.push_async_callback(adapters.close)
        for (engine_name, target), role in zip(
            place.engines.items(), chain(engines.roles, repeat("both")), strict=False
        ):
            try:
                await engine.add(engine_name, target, role=Role(role))
            except ValueError as error:
                raise StartError(f"engine.tls: {error}") from error
        return engine, adapters


async def _served_model(
    config: Config,
    name: str,
    place: ModelPlace,
    engine: EnginePool,
    adapters: AdapterRegistry,
    grammars: GrammarPool,
) -> ServedModel:
    """Return a base model with its tokenizer. Raises StartError if its configured chat template cannot be used."""
    settings = config.served[name]
    tokenizer = await _load_tokenizer(place.folder, settings.model.chat_template, config.section_of(name))
    own = replace(
        _settings(config),
        sampling_defaults=await sampling_defaults(place.folder, settings.model, config.section_of(name)),
        lane_capacity=settings.lanes.capacity(),
        tool_parser=settings.model.tool_parser,
        reasoning_parser=settings.model.reasoning_parser,
    )
    return ServedModel(engine, tokenizer, adapters, grammars=grammars, settings=own)


def _warn_of_missing_rows(model: ServedModel) -> None:
    """Log the tokens of a model's tokenizer for which the model has no rows. Prompts that have one are refused."""
    rows = model.engine.info.vocab_size
    if beyond := model.tokenizer.beyond(rows):
        some = dict(sorted(beyond.items(), key=lambda token: token[1])[:MOST_NAMED_TOKENS])
        log.warning("tokens_without_rows", model=model.name, rows=rows, tokens=some, count=len(beyond))


async def sampling_defaults(model_dir: Path, model: ModelConfig, where: str) -> dict[str, float]:
    """Return the sampling parameters that a model folder gives, if the configuration asks for them. Raises StartError,
    which names the section `where`, if they cannot be used."""
    if model.generation_config == "none":
        return {}
    try:
        return await asyncio.to_thread(read_sampling_defaults, model_dir)
    except (OSError, ValueError) as error:
        raise StartError(f"{where}.generation_config: {error}") from error


async def _load_tokenizer(model_dir: Path, template: Path | None, where: str = "model") -> Tokenizer:
    """Load the tokenizer of a model folder in a thread, with the chat template in the file `template`; None means the
    model's own. Raises StartError, which names the section `where`, if it fails with a given template, else OSError or
    ValueError."""
    try:
        return await asyncio.to_thread(Tokenizer.load, model_dir, template)
    except (OSError, ValueError) as error:
        if template is None:
            raise
        raise StartError(f"{where}.chat_template: {error}") from error


def _settings(config: Config) -> ServiceSettings:
    return ServiceSettings(
        request_timeout=config.http.request_timeout_s,
        first_token_timeout=config.http.first_token_timeout_s,
        engine_wait=config.http.engine_wait_s,
    )


def _responses(config: Config, redis: Redis, disk: Disk | None) -> Responses:
    settings = config.responses
    limits = StoreLimits(settings.keep_days * DAY, settings.tenant_bytes)
    return Responses(ResponseStore(redis, limits, prefix=config.redis.key_prefix), settings.store, disk)


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


async def _wait_for_engines(engines: Mapping[str, EnginePool], backends: Backends, group: EngineGroup | None) -> None:
    """Wait until one engine of each base model serves or, if this process started them (`group`), all of them. Raises
    StartError if that takes more than ENGINE_START_SECONDS or if, as its supervisor reports, one ended before."""

    async def ready() -> None:
        for name, engine in engines.items():
            own = sum(target.address.startswith(UNIX) for target in backends.models[name].engines.values())
            await engine.wait_serving(max(1, own) if group else 1)

    try:
        async with asyncio.timeout(ENGINE_START_SECONDS):
            await (group.unless_it_ends(ready()) if group else ready())
    except TimeoutError:
        away = ", ".join(name for name, engine in engines.items() if not engine.ready)
        raise StartError(f"the engine of {away} was not ready within {ENGINE_START_SECONDS:g} s") from None


async def _preload(models: ServedModels, config: Config, bar: StartBar) -> None:
    """Load the adapters that the configuration names, and show the progress on the bar. Those that cannot be loaded are
    listed with their error, and tried again. Raises StartError, whose message lists them, if one or more cannot have
    their name."""
    count, loaded = len(config.preloaded()), 0

    def one_done() -> None:
        nonlocal loaded
        loaded += 1
        bar.report(StartStage.ADAPTERS, f"loading adapters: {loaded} of {count}", loaded / count)

    refused = (await seed_adapters(models, config, one_done)).refused
    if refused:
        raise StartError("; ".join(f"adapter {name}: {reason}" for name, reason in refused.items()))
