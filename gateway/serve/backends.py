"""Starts the store and the engines that the gateways of one `loralane serve` share, and prepares the models.

The engines are started before the models are prepared: while a model is fetched or read, they import their
libraries and compile their kernels. With the embedded model on two cores, a first start so takes 13 to 16 s, not 33 s.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.rpc.target import EngineTarget
from gateway.config.models import ModelSettings
from gateway.redis.server import store_url
from gateway.serve.engine_group import ModelEngines, engines_running
from gateway.serve.launch import Launch
from gateway.serve.on_ray import engines_on_ray
from gateway.serve.prepare import prepare, prepared_folder, state_dir
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import Stop


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where a gateway process finds one base model."""

    engines: Mapping[str, EngineTarget]
    """Where the model's engines are, by name."""
    folder: Path
    """Folder of the prepared model, from which a gateway reads the tokenizer."""


@dataclass(frozen=True, slots=True)
class Backends:
    """Where a gateway process finds the store and the base models, and where it combines its metrics."""

    store: str
    """URL of the Redis that the gateways share."""
    models: Mapping[str, ModelPlace]
    """The base models by name."""
    metrics: Path | None = None
    """Folder in which the processes of one `serve` combine their metrics. None means that there is one process, whose
    metrics need no folder."""


async def _nothing() -> None:
    """Do nothing: the default of `meanwhile` in `started_backends`."""


@asynccontextmanager
async def started_backends(
    launch: Launch, stop: Stop, bar: StartBar, meanwhile: Callable[[], Awaitable[None]] = _nothing
) -> AsyncIterator[tuple[Backends, ModelEngines]]:
    """Run the store and the engines of all base models until the block ends; yields where they and the models are, and
    the engines' supervisors. The block begins when the models are prepared; the engines may still be loading them. For
    a model whose engines run elsewhere, none is started.

    Args:
        stop: kills the engines at a forced stop, and shortens their time to end in a hurried one.
        bar: shows the progress of the preparation and of the engines' start.
        meanwhile: awaited while the engines start and the models are prepared; the block begins when it is done, too.

    Raises:
        StoreStartError: the store does not start.
        StartError: a model cannot be prepared, an engine ends while it is prepared, there are too few GPUs, or the Ray
            cluster cannot be reached.
    """
    config = launch.config
    # The sockets are in a temporary folder, because socket paths must be short and data directories may be deep. Other
    # users cannot enter the folder: an engine does not authenticate clients that connect to its socket.
    with tempfile.TemporaryDirectory(prefix="loralane-engine-") as folder:
        stop.on_force(partial(shutil.rmtree, folder, ignore_errors=True))
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(store_url(launch.data_dir, config.redis.url))
            folders = {name: _prepared_folder(launch, settings) for name, settings in config.served.items()}
            groups = {}
            for number, (name, settings) in enumerate(config.served.items()):
                own = settings.engine_config(folders[name], state_dir(launch.config, launch.data_dir, name))
                replicas = 0 if settings.engines.addresses or config.ray_of(name) else settings.engines.replicas
                running = engines_running(own, replicas, Path(folder, f"{number}"), launch.engine, stop)
                groups[name] = await stack.enter_async_context(running)
            engines = ModelEngines(groups)
            stack.callback(engines.limit_stop, stop)
            preparing = await stack.enter_async_context(_prepared(launch, folders, engines, stop, bar))
            await meanwhile()
            places = {
                name: ModelPlace(groups[name].targets or _remote(settings), prepared)
                for (name, settings), prepared in zip(config.served.items(), await preparing, strict=True)
            }
            if config.cluster.ray is not None:
                engines.ray = await stack.enter_async_context(engines_on_ray(launch, store))
            yield Backends(store, places), engines


def _remote(settings: ModelSettings) -> dict[str, EngineTarget]:
    return {target.address: target for target in settings.engines.targets()}


def _prepared_folder(launch: Launch, settings: ModelSettings) -> Path | None:
    """Return the folder of a model that needs no preparation. None means that the model must be prepared."""
    if not launch.config.models:
        return launch.model_dir
    return prepared_folder(settings.model.source, launch.data_dir)


@asynccontextmanager
async def _prepared(
    launch: Launch, folders: Mapping[str, Path | None], engines: ModelEngines, stop: Stop, bar: StartBar
) -> AsyncIterator[asyncio.Task[list[Path]]]:
    """Start a task that prepares the models without a folder and tells their engines the new folders. Yields the task,
    which returns the folders of all models, in order. A second task then shows the progress of the engines' start on
    the bar. Both tasks are cancelled when the block ends."""
    preparing = asyncio.create_task(_prepare(launch, folders, engines, stop, bar), name="prepare")
    following = asyncio.create_task(_follow(bar, engines, preparing), name="start-bar")
    try:
        yield preparing
    finally:
        preparing.cancel()
        following.cancel()
        await asyncio.wait((preparing, following))


async def _prepare(
    launch: Launch, folders: Mapping[str, Path | None], engines: ModelEngines, stop: Stop, bar: StartBar
) -> list[Path]:
    """Prepare the models without a folder, one after the other, because each takes a processor for seconds. Returns the
    folders of all models, in order."""
    found = []
    for name, settings in launch.config.served.items():
        folder = folders[name]
        if folder is None:
            folder = await engines.unless_it_ends(prepare(settings.model.source, launch.data_dir, stop, bar))
            engines.groups[name].name_model(folder)
        found.append(folder)
    return found


async def _follow(bar: StartBar, engines: ModelEngines, preparing: asyncio.Task[list[Path]]) -> None:
    await asyncio.wait((preparing,))
    await bar.follow(engines)
