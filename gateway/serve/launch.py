"""Parameters with which gateways are started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.config.lanes import LanesConfig
from gateway.config.models import ModelSettings
from gateway.config.whole import Config

T = TypeVar("T")

ENGINE = ("engine.serve.server",)


class StartError(Exception):
    """The gateway cannot start; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Launch:
    """All that is needed to start a gateway: its configuration, its folders and its engine program."""

    config: Config
    model_dir: Path | None
    """Folder of the prepared model. None means that the model's source must be fetched or read first, or that
    there are several models."""
    data_dir: Path
    engine: tuple[str, ...] = ENGINE
    """The module that runs as the engine, followed by extra arguments for it."""

    def preloading(self, preload: Mapping[str, Path]) -> Launch:
        """Return a copy that loads, of the configured adapters, only those in `preload` at start, from the folders
        given there by name."""

        def only(name: str, settings: ModelSettings) -> ModelSettings:
            return replace(settings, preload={name: preload[name] for name in settings.preload if name in preload})

        return replace(self, config=self.config.with_served(only))


def share_of(config: Config, processes: int) -> Config:
    """Return the configuration of one of `processes` gateway processes: each gets an equal part of the `max_requests`
    of each lane, rounded up, and of the limits that apply while Redis is away (`limits.replicas` is multiplied)."""

    def share(name: str, settings: ModelSettings) -> ModelSettings:
        interactive, batch = settings.lanes.interactive, settings.lanes.batch
        lanes = LanesConfig(
            replace(interactive, max_requests=ceil(interactive.max_requests / processes)),
            replace(batch, max_requests=ceil(batch.max_requests / processes)),
        )
        return replace(settings, lanes=lanes)

    limits = replace(config.limits, replicas=config.limits.replicas * processes)
    return replace(config.with_served(share), limits=limits)


def encode(value: Any) -> bytes:
    """Return a dataclass of settings as msgpack."""
    return msgspec.msgpack.encode(value, enc_hook=_written)


def decode(text: bytes, kind: type[T]) -> T:
    """Return the dataclass that `encode` wrote. Raises msgspec.ValidationError for anything else."""
    return msgspec.msgpack.decode(text, type=kind, dec_hook=_read)


def _written(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"orders cannot hold a {type(value).__name__}")


def _read(kind: type, value: Any) -> Path:
    if issubclass(kind, Path):
        return Path(value)
    raise TypeError(f"orders cannot hold a {kind.__name__}")
