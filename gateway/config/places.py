"""Finds what a configuration names and this machine lacks: models, adapters, chat templates and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.process.adapter_files import is_place
from engine.process.host_memory import GIB, total_host_bytes
from engine.process.model_source import ModelNotFound, check_source
from gateway.config.models import ModelSettings
from gateway.config.whole import Config

NVIDIA = Path("/proc/driver/nvidia/version")
"""File that exists where NVIDIA's driver is loaded."""


def missing_places(config: Config) -> Iterator[str]:
    """Yield a sentence for each model, adapter to load at start and chat template that is not on this machine, with its
    place in the file and what to do. A hub is not asked. Adapters of engines elsewhere are not looked for."""
    for name, settings in config.served.items():
        section = config.section_of(name)
        try:
            check_source(settings.model.source)
        except (OSError, ModelNotFound) as error:
            yield f"{section}.source: {error}"
        yield from _missing_template(f"{section}.chat_template", settings.model.chat_template)
        if not settings.engines.addresses and config.ray_of(name) is None:
            yield from _missing_adapters(config, settings)
    for adapter, file in config.adapters.chat_templates.items():
        yield from _missing_template(f"adapters.chat_templates.{adapter}", file)


def impossible_memory(config: Config) -> Iterator[str]:
    """Yield a sentence for each page pool on a CPU that is larger than this machine's memory. Where a GPU may be used,
    only the engine knows the memory."""
    for name, settings in config.served.items():
        wanted, device = settings.engine.memory_gb * GIB, settings.engine.device
        is_here = not settings.engines.addresses and config.ray_of(name) is None
        if is_here and (device == "cpu" or (device == "auto" and not NVIDIA.exists())) and wanted > total_host_bytes():
            where = f"models.{name}.engine" if config.models else "engine"
            has = f"{wanted / GIB:,.1f} GiB, and this machine has {total_host_bytes() / GIB:,.1f} GiB"
            yield f"{where}.memory_gb: the page pool takes {has}: lower it, or set 0 for the default"


def _missing_adapters(config: Config, settings: ModelSettings) -> Iterator[str]:
    for adapter, place in settings.preload.items():
        if not is_place(place):
            yield (
                f"{config.preload_place(adapter)}: there is no adapter at {place}: name a PEFT folder or a .gguf file; "
                "one of the hub is loaded with `loralane adapters load` where adapters.hub allows it"
            )


def _missing_template(where: str, file: Path | None) -> Iterator[str]:
    if file is not None and not file.is_file():
        yield f"{where}: there is no file {file}: correct the path, or remove the line for the model's own template"
