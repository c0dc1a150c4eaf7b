"""Parameters with which gateways are started, and the store and engine that several gateways share."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path

from gateway.config.sections import LanesConfig
from gateway.config.whole import Config
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import Stop
from gateway.serve.supervisor import EngineSupervisor
from gateway.store import store_url

EMBEDDED_NAME = "smollm2-135m-instruct"
ENGINE = ("engine.server",)


class StartError(Exception):
    """The gateway cannot start; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The configuration of a gateway, and what depends on where it runs: its folders and its engine program."""

    config: Config
    model_dir: Path
    """Folder of the prepared model."""
    data_dir: Path
    engine: tuple[str, ...] = ENGINE
    """The module that runs as the engine, followed by extra arguments for it."""

    def preloading(self, preload: Mapping[str, Path]) -> Launch:
        """Return a copy that loads other adapters at start."""
        return replace(self, config=replace(self.config, adapters=replace(self.config.adapters, preload=preload)))


@dataclass(frozen=True, slots=True)
class Ground:
    """The services that a gateway process needs before it starts."""

    store: str
    """URL of the Redis that the gateways share."""
    engine: str
    """Address of the engine."""
    metrics: Path | None = None
    """Folder in which the processes of one `serve` combine their metrics. None means that there is one process."""


@asynccontextmanager
async def grounded(launch: Launch, stop: Stop, bar: StartBar) -> AsyncIterator[tuple[Ground, EngineSupervisor]]:
    """Run the store and the engine until the block ends. Raises StoreStartError."""
    # The socket is in a temporary folder, because socket paths must be short and data directories may be deep. Other
    # users cannot enter the folder: the engine does not authenticate clients that connect to its socket.
    with tempfile.TemporaryDirectory(prefix="loralane-engine-") as folder:
        async with store_url(launch.data_dir, launch.config.redis.url) as store:
            supervisor = EngineSupervisor(
                launch.config.engine_config(launch.model_dir, launch.data_dir / "engine"),
                Path(folder) / "socket",
                launch.engine,
            )
            async with supervisor, shown(bar, supervisor):
                stop.at_last(supervisor.kill)
                stop.at_last(partial(shutil.rmtree, folder, ignore_errors=True))
                try:
                    yield Ground(store, supervisor.address), supervisor
                finally:
                    supervisor.stop_seconds = stop.within(supervisor.stop_seconds)


@asynccontextmanager
async def shown(bar: StartBar, supervisor: EngineSupervisor) -> AsyncIterator[None]:
    """Let a bar show how far the engine's start is while inside, until the bar is closed."""
    following = asyncio.create_task(bar.follow(supervisor), name="start-bar")
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait((following,))


def model_name(config: Config) -> str:
    """Return the name of the base model for clients: the configured one, or else the last part of its path or id."""
    if config.model.name:
        return config.model.name
    if config.model.source == "embedded":
        return EMBEDDED_NAME
    return Path(config.model.source).name.removesuffix(".gguf").lower()


def share_of(config: Config, processes: int) -> Config:
    """Return the configuration of one of several processes: each gets an equal part of the `max_requests` of each lane,
    rounded up, and of the limits that apply while Redis is away."""
    interactive, batch = config.lanes.interactive, config.lanes.batch
    lanes = LanesConfig(
        replace(interactive, max_requests=ceil(interactive.max_requests / processes)),
        replace(batch, max_requests=ceil(batch.max_requests / processes)),
    )
    return replace(config, lanes=lanes, limits=replace(config.limits, replicas=config.limits.replicas * processes))
