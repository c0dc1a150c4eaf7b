"""Puts together what serves the requests of one program: an engine in this process, and a gateway without a network."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import structlog

from engine.config import NESTED, EngineConfig
from engine.grammar_check.pool import GrammarPool
from engine.process.cores import load_torch
from engine.process.files import default_data_dir
from engine.process.generation_config import read_sampling_defaults
from engine.serve.local import LocalEngine, prepared_model
from gateway.adapters.admin import AdapterAdmin
from gateway.adapters.record import ADAPTERS
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.sources import AdapterSources
from gateway.config.models import served_name
from gateway.config.sections import AdaptersConfig
from gateway.core.errors import ApiError
from gateway.core.tenants import Principal, Tenant
from gateway.limiter.local import LocalLimiter
from gateway.llm.adapters import AdapterFolders, adapter_source
from gateway.registry.memory import MemoryRecordStore
from gateway.requests.served_model import ServedModel, ServedModels
from gateway.requests.service import Gateway
from gateway.requests.settings import ServiceSettings
from gateway.text.reasoning.parser import ReasoningParserName
from gateway.text.tokenizer import Tokenizer
from gateway.text.tools.dialects import ToolParserName

CALLER = Principal(Tenant("local"), "local")
"""The tenant of all requests of the program. It has no limits."""
YEAR = 365 * 86_400.0
"""Seconds after which the processes that check grammars start even without a grammar: in effect, they start with the
first grammar only."""
UNLIMITED = 2**62
"""Value for limits of `ServiceSettings` that cannot be None. No request reaches it."""


class EngineFailed(RuntimeError):
    """The engine ended because of an exception, which is the cause of this one. It answers no further requests."""


class ModelOptions(TypedDict, total=False):
    """Options of `LLM` and `AsyncLLM`. All have defaults."""

    adapters: Mapping[str, str | Path]
    """Adapters to load at the start, as by `add_adapter`: folders or Hugging Face ids by name."""
    dtype: str
    """`auto` (the default), `float32`, `bfloat16` or `float16`."""
    device: str
    """`auto` (the default), `cpu` or `cuda`."""
    max_model_len: int
    """Maximum length of a prompt and its answer, in tokens. The default is what the model was made for, at most
    8192."""
    engine: Mapping[str, Any]
    """Further settings of the section `engine` of the configuration file (docs/configuration.md)."""
    chat_template: str | Path
    """A file with a Jinja template in place of the model's own."""
    tool_parser: ToolParserName
    reasoning_parser: ReasoningParserName
    generation_config: Literal["auto", "none"]
    """`auto` (the default): sampling parameters that are not given come from the model's generation_config.json."""
    data_dir: str | Path
    """Folder for prepared models and fetched adapters. The default is that of `loralane serve`."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that serve the requests of one program: engine, gateway, model, and the adapters that requests name by
    folder."""

    engine: LocalEngine
    gateway: Gateway
    model: ServedModel
    folders: AdapterFolders

    @property
    def adapters(self) -> AdapterRegistry:
        return self.model.adapters

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Raise EngineFailed in place of an ApiError that came about because the engine failed."""
        try:
            yield
        except ApiError:
            if self.engine.failure is None:
                raise
            raise EngineFailed(f"the engine failed: {self.engine.failure!r}") from self.engine.failure


@asynccontextmanager
async def opened(source: str, options: ModelOptions) -> AsyncIterator[Parts]:
    """Load the model `source`, as `loralane serve --model` takes it, and yield the parts that serve its requests; at
    the end, free it. Raises ApiError for an adapter, and ValueError, OSError or TypeError for the model or an
    option."""
    _quiet_logs()
    data_dir = Path(options.get("data_dir") or default_data_dir(os.environ))
    await asyncio.to_thread(load_torch)
    folder = await asyncio.to_thread(prepared_model, source, data_dir)
    template = options.get("chat_template")
    settings = ServiceSettings(
        max_pooled_tokens=UNLIMITED,
        max_prompt_logprobs=UNLIMITED,
        request_timeout=None,
        first_token_timeout=None,
        engine_wait=0.0,  # an engine that has ended does not come back
        tool_parser=options.get("tool_parser", "auto"),
        reasoning_parser=options.get("reasoning_parser", "auto"),
        sampling_defaults=read_sampling_defaults(folder) if options.get("generation_config", "auto") == "auto" else {},
    )
    async with AsyncExitStack() as stack:
        grammars = stack.enter_context(closing(GrammarPool(start_after=YEAR)))
        everything = AdaptersConfig(roots=(Path("/"),), hub=("*",))
        sources = stack.enter_context(closing(AdapterSources(everything, data_dir / "fetched")))
        engine = LocalEngine(engine_config(folder, options))
        stack.push_async_callback(engine.close)
        names = (served_name(source),)
        adapters = AdapterRegistry(engine, MemoryRecordStore(ADAPTERS), sources, base_names=names)
        await adapters.start()
        stack.push_async_callback(adapters.close)
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder, Path(template) if template else None)
        await engine.start()
        await adapters.restore()
        model = ServedModel(engine, tokenizer, adapters, grammars=grammars, settings=settings)
        limiter = LocalLimiter()
        await limiter.configure([CALLER.tenant])
        gateway = Gateway(ServedModels([model]), AdapterAdmin([adapters], sources), limiter, settings=settings)
        stack.push_async_callback(gateway.close)
        stack.callback(gateway.end_requests)
        parts = Parts(engine, gateway, model, AdapterFolders(adapters))
        for name, place in options.get("adapters", {}).items():
            await parts.adapters.load(name, adapter_source(place))
        yield parts


def engine_config(folder: Path, options: ModelOptions) -> EngineConfig:
    """Return the engine's configuration for a prepared model. Raises ValueError or TypeError for an option that cannot
    be used."""
    given: Mapping[str, Any] = options
    values = dict(given.get("engine", {}))
    values |= {name: kind(**values[name]) for name, kind in NESTED.items() if isinstance(values.get(name), Mapping)}
    values |= {name: given[name] for name in ("dtype", "device", "max_model_len") if name in given}
    return EngineConfig(str(folder), **values)


def _quiet_logs() -> None:
    """Log warnings to standard error, unless the program has configured structlog, which otherwise prints every event
    to standard output."""
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        )
