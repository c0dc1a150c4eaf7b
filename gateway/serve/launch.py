"""What gateways are started with, and what several of them share."""

from __future__ import annotations

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
from gateway.serve.stopping import Stop
from gateway.serve.supervisor import EngineSupervisor
from gateway.store import store_url

EMBEDDED_NAME = "smollm2-135m-instruct"
ENGINE = ("engine.server",)


class StartError(Exception):
    """The gateway cannot start; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Where this gateway runs, apart from what its configuration says."""

    config: Config
    model_dir: Path
    """The prepared model."""
    data_dir: Path
    engine: tuple[str, ...] = ENGINE
    """Module that is run as the engine, and arguments of its own."""

    def preloading(self, preload: Mapping[str, Path]) -> Launch:
        """The same, which begins with other adapters."""
        return replace(self, config=replace(self.config, adapters=replace(self.config.adapters, preload=preload)))


@dataclass(frozen=True, slots=True)
class Ground:
    """What gateways stand on."""

    store: str
    """URL of the Redis they share."""
    engine: str
    """Address of the engine."""
    metrics: Path | None = None
    """Folder where the processes of one `serve` count together; None: there is one process."""


@asynccontextmanager
async def grounded(launch: Launch, stop: Stop) -> AsyncIterator[tuple[Ground, EngineSupervisor]]:
    """Run the store and the engine while inside. Raises StoreStartError."""
    # In the temporary folder, for socket paths are short and data directories may be deep; and in one that nobody else
    # may enter: who can connect to the engine is asked for nothing.
    with tempfile.TemporaryDirectory(prefix="loralane-engine-") as folder:
        async with store_url(launch.data_dir, launch.config.redis.url) as store:
            supervisor = EngineSupervisor(
                launch.config.engine_config(launch.model_dir, launch.data_dir / "engine"),
                Path(folder) / "socket",
                launch.engine,
            )
            async with supervisor:
                stop.at_last(supervisor.kill)
                stop.at_last(partial(shutil.rmtree, folder, ignore_errors=True))
                try:
                    yield Ground(store, supervisor.address), supervisor
                finally:
                    supervisor.stop_seconds = stop.within(supervisor.stop_seconds)


def model_name(config: Config) -> str:
    """What clients call the base model, unless the configuration says otherwise: the last part of its path or id."""
    if config.model.name:
        return config.model.name
    if config.model.source == "embedded":
        return EMBEDDED_NAME
    return Path(config.model.source).name.removesuffix(".gguf").lower()


def share_of(config: Config, processes: int) -> Config:
    """One process's part of what is bounded for the whole: requests let into a lane, and limits while Redis is away."""
    interactive, batch = config.lanes.interactive, config.lanes.batch
    lanes = LanesConfig(
        replace(interactive, max_requests=ceil(interactive.max_requests / processes)),
        replace(batch, max_requests=ceil(batch.max_requests / processes)),
    )
    return replace(config, lanes=lanes, limits=replace(config.limits, replicas=config.limits.replicas * processes))
