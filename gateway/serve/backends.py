"""Starts the store and the engines that the gateways of one `loralane serve` share, and prepares the model.

The engines are started before the model is prepared: while a model is fetched or converted, they import their
libraries and compile their kernels. With the embedded model on two cores, a first start so takes 13 to 16 s, not 33 s.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.rpc.target import EngineTarget
from gateway.redis.server import store_url
from gateway.serve.engine_group import EngineGroup, engines_running
from gateway.serve.launch import Launch
from gateway.serve.prepare import prepare
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import Stop


@dataclass(frozen=True, slots=True)
class Backends:
    """Where a gateway process finds the store, the engine and the model, and where it combines its metrics."""

    store: str
    """URL of the Redis that the gateways share."""
    engines: Mapping[str, EngineTarget]
    """Where the engines are, by name."""
    model_dir: Path
    """Folder of the prepared model, from which a gateway reads the tokenizer."""
    metrics: Path | None = None
    """Folder in which the processes of one `serve` combine their metrics. None means that there is one process, whose
    metrics need no folder."""


async def _nothing() -> None:
    """Do nothing."""


@asynccontextmanager
async def started_backends(
    launch: Launch, stop: Stop, bar: StartBar, meanwhile: Callable[[], Awaitable[None]] = _nothing
) -> AsyncIterator[tuple[Backends, EngineGroup]]:
    """Run the store and the engines until the block ends; yields where they and the model are, and the engines'
    supervisors. The block begins when the model is prepared; the engines may still be loading it. If the configuration
    names engines that run elsewhere, none is started.

    Args:
        stop: kills the engines at a forced stop, and shortens their time to end in a hurried one.
        bar: shows the progress of the preparation and of the engines' start.
        meanwhile: awaited while the engines start and the model is prepared; the block begins when it is done, too.

    Raises:
        StoreStartError: the store does not start.
        StartError: the model cannot be prepared, an engine ends while it is prepared, or there are too few GPUs.
    """
    config = launch.config
    # The sockets are in a temporary folder, because socket paths must be short and data directories may be deep. Other
    # users cannot enter the folder: an engine does not authenticate clients that connect to its socket.
    with tempfile.TemporaryDirectory(prefix="loralane-engine-") as folder:
        stop.on_force(partial(shutil.rmtree, folder, ignore_errors=True))
        own = config.engine_config(launch.model_dir, launch.data_dir / "engine")
        replicas = 0 if config.engines.addresses else config.engines.replicas
        async with (
            store_url(launch.data_dir, config.redis.url) as store,
            engines_running(own, replicas, Path(folder), launch.engine, stop) as group,
        ):
            try:
                async with _prepared(launch, group, stop, bar) as preparing:
                    await meanwhile()
                    remote = {target.address: target for target in config.engines.targets()}
                    yield Backends(store, group.targets or remote, await preparing), group
            finally:
                group.limit_stop(stop)


@asynccontextmanager
async def _prepared(launch: Launch, group: EngineGroup, stop: Stop, bar: StartBar) -> AsyncIterator[asyncio.Task[Path]]:
    """Prepare the model and name it to the engine in a task, which is yielded and returns the model's folder. A second
    task then lets the bar follow the engine's start. Both are cancelled when the block ends."""
    preparing = asyncio.create_task(_prepare(launch, group, stop, bar), name="prepare")
    following = asyncio.create_task(_follow(bar, group, preparing), name="start-bar")
    try:
        yield preparing
    finally:
        preparing.cancel()
        following.cancel()
        await asyncio.wait((preparing, following))


async def _prepare(launch: Launch, group: EngineGroup, stop: Stop, bar: StartBar) -> Path:
    if launch.model_dir is not None:
        return launch.model_dir
    folder = await group.unless_it_ends(prepare(launch.config.model.source, launch.data_dir, stop, bar))
    group.name_model(folder)
    return folder


async def _follow(bar: StartBar, group: EngineGroup, preparing: asyncio.Task[Path]) -> None:
    await asyncio.wait((preparing,))
    await bar.follow(group)
