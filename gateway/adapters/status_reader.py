"""Reads the status of a gateway's adapters from its registry and its engine."""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Callable, Mapping

from engine.rpc.api import EngineApi
from engine.rpc.stream import EngineUnavailable
from gateway.adapters.mirror import AdapterMirror
from gateway.adapters.names import NameOwner
from gateway.adapters.status import statuses_of
from gateway.adapters.waiting import WaitingSeeds
from gateway.api_schema.adapters import AdapterStatus
from gateway.core.errors import ApiError


class StatusReader:
    """Tells the status of all adapters of one base model on one gateway."""

    def __init__(self, owner: NameOwner, engine: EngineApi, mirror: AdapterMirror, waiting: WaitingSeeds) -> None:
        """`owner` is the registry of the adapters, `mirror` and `waiting` are its parts, and `engine` is the
        gateway's."""
        self._owner = owner
        self._engine = engine
        self._mirror = mirror
        self._waiting = waiting

    @property
    def errors(self) -> Mapping[str, str]:
        """Reason, by adapter name, why this gateway does not serve what the registry or the configuration says."""
        return ChainMap(self._mirror.errors, self._waiting.errors)

    async def all(self) -> list[AdapterStatus]:
        """Return the status of all adapters, sorted by name, with one call to the engine. While the engine is away, all
        have the tier "disk" and no statistics."""
        try:
            adapters = (await self._engine.stats()).adapters
        except EngineUnavailable:
            adapters = ()
        served = {name: hold.adapter_hash for name, hold in self._mirror.served.items()}
        facts = self._owner.base_model, dict(self._owner.records), served, dict(self.errors), tuple(adapters)
        return await asyncio.to_thread(statuses_of, *facts)

    async def one(self, name: str, missing: Callable[[str], ApiError]) -> AdapterStatus:
        """Return the status of the adapter `name` (no alias). Raises what `missing` returns if there is none."""
        status = next((status for status in await self.all() if status.name == name), None)
        if status is None:
            raise missing(name)
        return status
