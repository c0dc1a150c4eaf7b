"""Parameters with which gateways are started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from gateway.config.sections import LanesConfig
from gateway.config.whole import Config

EMBEDDED_NAME = "smollm2-135m-instruct"
ENGINE = ("engine.server",)


class StartError(Exception):
    """The gateway cannot start; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Launch:
    """All that is needed to start a gateway: its configuration, its folders and its engine program."""

    config: Config
    model_dir: Path | None
    """Folder of the prepared model. None means that `config.model.source` must be fetched or converted first."""
    data_dir: Path
    engine: tuple[str, ...] = ENGINE
    """The module that runs as the engine, followed by extra arguments for it."""

    def preloading(self, preload: Mapping[str, Path]) -> Launch:
        """Return a copy that loads the adapters `preload` (folders by name) at start in place of the configured
        ones."""
        return replace(self, config=replace(self.config, adapters=replace(self.config.adapters, preload=preload)))


def model_name(config: Config) -> str:
    """Return the name of the base model for clients: the configured one, EMBEDDED_NAME for the embedded model, or else
    the last part of its path or id in lower case, without .gguf."""
    if config.model.name:
        return config.model.name
    if config.model.source == "embedded":
        return EMBEDDED_NAME
    return Path(config.model.source).name.removesuffix(".gguf").lower()


def share_of(config: Config, processes: int) -> Config:
    """Return the configuration of one of `processes` gateway processes: each gets an equal part of the `max_requests`
    of each lane, rounded up, and of the limits that apply while Redis is away (`limits.replicas` is multiplied)."""
    interactive, batch = config.lanes.interactive, config.lanes.batch
    lanes = LanesConfig(
        replace(interactive, max_requests=ceil(interactive.max_requests / processes)),
        replace(batch, max_requests=ceil(batch.max_requests / processes)),
    )
    return replace(config, lanes=lanes, limits=replace(config.limits, replicas=config.limits.replicas * processes))
