"""Opens the base models of a gateway: connects them to their engines, and loads their tokenizers and adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

import structlog
from redis.asyncio import Redis

from engine.grammar_check.pool import GrammarPool
from engine.process.generation_config import read_sampling_defaults
from engine.rpc.target import UNIX
from gateway.adapters.admin import AdapterAdmin
from gateway.adapters.names import NameLocks
from gateway.adapters.own_text import comparison_with
from gateway.adapters.record import adapter_store
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.sources import AdapterSources
from gateway.config.models import ModelConfig
from gateway.config.routes import virtual_names
from gateway.config.whole import Config
from gateway.engines.directory import EngineDirectory, engine_directory
from gateway.engines.member import member_store
from gateway.engines.pool import EnginePool
from gateway.requests.served_model import ServedModel, ServedModels
from gateway.requests.settings import ServiceSettings
from gateway.routing.news import Role
from gateway.routing.split import SplitMode
from gateway.serve.backends import Backends, ModelPlace
from gateway.serve.engine_group import EngineGroup
from gateway.serve.launch import StartError
from gateway.serve.reload_target import seed_adapters
from gateway.serve.start_bar import StartBar, StartStage
from gateway.text.tokenizer import Tokenizer

ENGINE_START_SECONDS = 600.0
"""Seconds that the engine may take to become ready. Reading tens of gigabytes of weights takes minutes."""
MOST_NAMED_TOKENS = 8
"""Maximum number of tokens that a warning names."""

log = structlog.get_logger("serve")


class ModelRoom(NamedTuple):
    """The base models with their engines and adapters."""

    engines: Mapping[str, EnginePool]
    """By the model's name."""
    models: ServedModels
    adapters: AdapterAdmin
    members: EngineDirectory
    """The engines that join while the gateway runs."""


async def open_models(
    stack: AsyncExitStack,
    config: Config,
    backends: Backends,
    redis: Redis,
    sources: AdapterSources,
    grammars: GrammarPool,
) -> ModelRoom:
    """Connect the base models to their engines, which need not be ready yet. Raises StartError."""
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
    return ModelRoom(engines, models, adapters, await stack.enter_async_context(directory))


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
    tokenizer = await load_tokenizer(place.folder, settings.model.chat_template, config.section_of(name))
    own = replace(
        service_settings(config),
        sampling_defaults=await sampling_defaults(place.folder, settings.model, config.section_of(name)),
        lane_capacity=settings.lanes.capacity(),
        tool_parser=settings.model.tool_parser,
        reasoning_parser=settings.model.reasoning_parser,
    )
    return ServedModel(engine, tokenizer, adapters, grammars=grammars, settings=own)


def warn_of_missing_rows(model: ServedModel) -> None:
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


async def load_tokenizer(model_dir: Path, template: Path | None, where: str = "model") -> Tokenizer:
    """Load the tokenizer of a model folder in a thread, with the chat template in the file `template`; None means the
    model's own. Raises StartError, which names the section `where`, if it fails with a given template, else OSError or
    ValueError."""
    try:
        return await asyncio.to_thread(Tokenizer.load, model_dir, template)
    except (OSError, ValueError) as error:
        if template is None:
            raise
        raise StartError(f"{where}.chat_template: {error}") from error


def service_settings(config: Config) -> ServiceSettings:
    return ServiceSettings(
        request_timeout=config.http.request_timeout_s,
        first_token_timeout=config.http.first_token_timeout_s,
        engine_wait=config.http.engine_wait_s,
    )


async def wait_for_engines(engines: Mapping[str, EnginePool], backends: Backends, group: EngineGroup | None) -> None:
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


async def preload(models: ServedModels, config: Config, bar: StartBar) -> None:
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
