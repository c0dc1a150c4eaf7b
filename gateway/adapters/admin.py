"""The adapters of all base models of a gateway, as operators see and change them.

Each base model has a registry of its own. A name belongs to one model (`gateway.adapters.names`). Should two models
have one name nevertheless, because it was configured while Redis was away, then every gateway serves the adapter of the
model that comes first in the configuration (`gateway.core.routing`), and the other is listed with an error until an
operator unloads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from engine.process.adapter_files import CONFIG_FILE, find_gguf
from engine.process.small_files import read_small
from gateway.adapters.mirror import AdapterFetcher
from gateway.adapters.names import AdapterNames, NameLocks
from gateway.adapters.registry import AdapterRegistry
from gateway.api_schema.adapters import AdapterStatus
from gateway.config.models import served_name
from gateway.core.errors import ApiError, invalid_request
from gateway.core.routing import find_adapter


class _PeftConfig(Struct):
    """The field of PEFT's adapter_config.json that names the base model: its path or Hugging Face id."""

    base_model_name_or_path: str | None = None


class AdapterAdmin:
    """Finds the registry that an operator's call is about, and combines what the registries tell."""

    def __init__(
        self,
        registries: Sequence[AdapterRegistry],
        sources: AdapterFetcher,
        origins: Mapping[str, str] | None = None,
        locks: NameLocks | None = None,
    ) -> None:
        """
        Args:
            registries: one for each base model, in the order of the configuration. From now on, each refuses names that
                another has.
            sources: finds the files of adapters.
            origins: configured source of each base model (a path or an id), by the model's name.
            locks: locks of adapters' names. None means that no other gateway changes the registries.
        """
        self._registries = {registry.base_model: registry for registry in registries}
        self._sources = sources
        self._origins = origins or {}
        names = AdapterNames(registries, locks)
        for registry in registries:
            registry.share_names(names)

    @property
    def next_changes(self) -> list[asyncio.Event]:
        """One event for each base model's registry, set at the next change of one of its adapters. Each change replaces
        the event, so fetch the list anew."""
        return [registry.next_change for registry in self._registries.values()]

    def of(self, name: str, base_model: str = "") -> AdapterRegistry:
        """Return the registry of the adapter `name` (no alias): of `base_model` if given, else the first that has the
        name or drains an unloaded adapter of that name, else the first. Raises ApiError (INVALID_REQUEST) if there is
        no such base model."""
        if base_model:
            return self._named(base_model)
        registries = list(self._registries.values())
        has = (registry for registry in registries if name in registry.records)
        drains = (registry for registry in registries if registry.is_draining(name))
        return next(chain(has, drains, registries))

    async def to_load(self, name: str, source: str, base_model: str = "") -> AdapterRegistry:
        """Return the registry to load the adapter at `source` into as `name`: that of `base_model`; if that is empty,
        the only one, the one that has the name, or that of the base model which the adapter's own configuration names.

        Raises ApiError (INVALID_REQUEST): there is no such base model, the files are not available, or they name none
        of the base models.
        """
        if base_model or len(self._registries) == 1:
            return self.of(name, base_model)
        known = self.of(name)
        return known if name in known.records else await self._made_for(source)

    async def statuses(self) -> list[AdapterStatus]:
        """Return the status of all adapters, sorted by name. If adapters of two base models have one name, the one that
        is not served has an error that says so."""
        answers = await asyncio.gather(*(registry.statuses() for registry in self._registries.values()))
        together = [self._checked(status) for statuses in answers for status in statuses]
        return sorted(together, key=lambda status: status.name)

    def _checked(self, status: AdapterStatus) -> AdapterStatus:
        if len(self._registries) == 1:
            return status
        target = find_adapter(status.name, [registry.catalog for registry in self._registries.values()])
        if target is not None and list(self._registries)[target.model] == status.base_model:
            return status
        owner = "a base model has this name" if target is None else f"{list(self._registries)[target.model]} has it too"
        return replace(status, served_version="", error=f"not served: {owner}; unload one of the two")

    def _named(self, base_model: str) -> AdapterRegistry:
        if base_model not in self._registries:
            message = f"there is no base model {base_model[:80]!r}; there are {', '.join(self._registries)}"
            raise invalid_request(message, "base_model")
        return self._registries[base_model]

    async def _made_for(self, source: str) -> AdapterRegistry:
        """Return the registry of the base model that the adapter's own configuration names. A source on the hub or at a
        URL is downloaded for that, and once more by the load. Raises ApiError like `to_load`."""
        folder = await self._sources.fetch(source)
        wanted = await asyncio.to_thread(_base_model_of, folder)
        matches = [registry for base, registry in self._registries.items() if wanted and self._is_named(base, wanted)]
        if len(matches) != 1:
            reason = f"the adapter's {CONFIG_FILE} says {wanted!r}" if wanted else "the adapter names none"
            choices = ", ".join(self._registries)
            raise invalid_request(f"set base_model to one of {choices}: {reason}", "base_model")
        return matches[0]

    def _is_named(self, base: str, wanted: str) -> bool:
        """Return whether `wanted`, the path or id that an adapter's configuration gives for its base model, means the
        base model named `base`: it equals that model's name or source, or a model from the source `wanted` would be
        named `base` by default."""
        origin = self._origins.get(base, "")
        return wanted in (base, origin) or base == served_name(wanted) or _same_folder(wanted, origin)


def _base_model_of(folder: Path) -> str:
    """Return the base model that an adapter's own configuration names; empty if it names none, as GGUF files do not.
    Raises ApiError (INVALID_REQUEST) if that cannot be read."""
    try:
        if find_gguf(folder):
            return ""
        return msgspec.json.decode(read_small(folder / CONFIG_FILE), type=_PeftConfig).base_model_name_or_path or ""
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> ApiError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return invalid_request(f"set base_model: the adapter's {CONFIG_FILE} cannot be read ({reason})", "base_model")


def _same_folder(first: str, second: str) -> bool:
    return bool(second) and Path(first).is_absolute() and Path(first).resolve() == Path(second).resolve()
