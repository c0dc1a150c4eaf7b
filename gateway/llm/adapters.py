"""Adapters that requests name by their folders or GGUF files."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path

from engine.process.adapter_files import is_place
from gateway.adapters.registry import AdapterRegistry
from gateway.core.errors import invalid_request

NOT_OF_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")


class AdapterFolders:
    """Loads adapters on demand. A request may name an adapter's folder, which is loaded on its first use, under a name
    made of its path."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._locks: dict[str, asyncio.Lock] = {}

    async def name_of(self, adapter: str | Path | None) -> str:
        """Return the name under which requests reach an adapter, given its name or its folder. None stands for the base
        model. Raises ApiError if there is no such adapter, or it cannot be used."""
        catalog = self._registry.catalog
        if adapter is None:
            return catalog.bases[0]
        if isinstance(adapter, str) and catalog.knows(adapter):
            return adapter
        name, source = folder_name(adapter), adapter_source(Path(adapter))
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._registry.records:
                _check_folder(adapter)
                await self._registry.load(name, source)
        return name


def _check_folder(adapter: str | Path) -> None:
    if not is_place(Path(adapter).expanduser()):
        raise invalid_request(
            f"{str(adapter)!r} is neither the name of an adapter nor a folder or GGUF file", "adapter"
        )


def folder_name(path: str | Path) -> str:
    """Return a valid name for the adapter in a folder, which differs from that of any other folder."""
    folder = Path(path).expanduser().resolve()
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:10]
    return f"{NOT_OF_NAMES.sub('-', folder.name).lstrip('-_.')[:64] or 'adapter'}-{digest}"


def adapter_source(place: str | Path) -> str:
    """Return an adapter's source as registries take it: the absolute path of a folder or GGUF file, or else a Hugging
    Face id."""
    folder = Path(place).expanduser()
    return str(folder.resolve()) if isinstance(place, Path) or is_place(folder) else place
