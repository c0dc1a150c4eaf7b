"""Starts the store and the engine that the gateways of one `loralane serve` share, and prepares the model.

The engine is started before the model is prepared: while a model is fetched or converted, the engine imports its
libraries and compiles its kernels. With the embedded model on two cores, a first start so takes 13 to 16 s, not 33 s.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gateway.redis.server import store_url
from gateway.serve.launch import Launch
from gateway.serve.prepare import prepare
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import Stop
from gateway.serve.supervisor import EngineSupervisor


@dataclass(frozen=True, slots=True)
class Backends:
    """Where a gateway process finds the store, the engine and the model, and where it combines its metrics."""

    store: str
    """URL of the Redis that the gateways share."""
    engine: str
    """Address of the engine."""
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
) -> AsyncIterator[tuple[Backends, EngineSupervisor]]:
    """Run the store and the engine until the block ends; yields where they and the model are, and the engine's
    supervisor. The block begins when the model is prepared; the engine may still be loading it.

    Args:
        stop: kills the engine at a forced stop, and shortens its time to end in a hurried one.
        bar: shows the progress of the preparation and of the engine's start.
        meanwhile: awaited while the engine starts and the model is prepared; the block begins when it is done, too.

    Raises:
        StoreStartError: the store does not start.
        StartError: the model cannot be prepared, or the engine ends while it is prepared.
    """
    # The socket is in a temporary folder, because socket paths must be short and data directories may be deep. Other
    # users cannot enter the folder: the engine does not authenticate clients that connect to its socket.
    with tempfile.TemporaryDirectory(prefix="loralane-engine-") as folder:
        async with store_url(launch.data_dir, launch.config.redis.url) as store:
            supervisor = EngineSupervisor(
                launch.config.engine_config(launch.model_dir, launch.data_dir / "engine"),
                Path(folder) / "socket",
                launch.engine,
            )
            async with supervisor:
                stop.on_force(supervisor.kill)
                stop.on_force(partial(shutil.rmtree, folder, ignore_errors=True))
                try:
                    async with _prepared(launch, supervisor, stop, bar) as preparing:
                        await meanwhile()
                        yield Backends(store, supervisor.address, await preparing), supervisor
                finally:
                    supervisor.stop_seconds = stop.time_limit(supervisor.stop_seconds)


@asynccontextmanager
async def _prepared(
    launch: Launch, supervisor: EngineSupervisor, stop: Stop, bar: StartBar
) -> AsyncIterator[asyncio.Task[Path]]:
    """Prepare the model and name it to the engine in a task, which is yielded and returns the model's folder. A second
    task then lets the bar follow the engine's start. Both are cancelled when the block ends."""
    preparing = asyncio.create_task(_prepare(launch, supervisor, stop, bar), name="prepare")
    following = asyncio.create_task(_follow(bar, supervisor, preparing), name="start-bar")
    try:
        yield preparing
    finally:
        preparing.cancel()
        following.cancel()
        await asyncio.wait((preparing, following))


async def _prepare(launch: Launch, supervisor: EngineSupervisor, stop: Stop, bar: StartBar) -> Path:
    if launch.model_dir is not None:
        return launch.model_dir
    folder = await supervisor.unless_it_ends(prepare(launch.config.model.source, launch.data_dir, stop, bar))
    supervisor.name_model(folder)
    return folder


async def _follow(bar: StartBar, supervisor: EngineSupervisor, preparing: asyncio.Task[Path]) -> None:
    await asyncio.wait((preparing,))
    await bar.follow(supervisor)
