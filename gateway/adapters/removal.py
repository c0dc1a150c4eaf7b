"""Unloads adapters, and waits for the requests that still use them."""

from __future__ import annotations

import asyncio

from gateway.adapters.loading import AdapterLoader
from gateway.adapters.record import check_drain, name_conflict
from gateway.adapters.seeding import AdapterSeeding
from gateway.adapters.versions import AdapterVersions
from gateway.core.errors import model_not_found


class AdapterRemoval:
    """Removes adapters from the registry of one base model, for one gateway."""

    def __init__(self, loader: AdapterLoader, versions: AdapterVersions, seeding: AdapterSeeding) -> None:
        """`loader` writes the registry, `versions` are those of the gateway's engine, and `seeding` knows what the
        configuration lists."""
        self._loader = loader
        self._owner = loader.owner
        self._mirror = loader.mirror
        self._versions = versions
        self._seeding = seeding
        self._draining: dict[str, asyncio.Task[int]] = {}

    def is_draining(self, name: str) -> bool:
        """Return whether requests of an adapter that had this name (no alias) still run after its unload."""
        return name in self._draining

    async def unload(self, name: str, drain_seconds: float | None = None) -> int:
        """Remove an adapter, wait up to `drain_seconds` for its requests here, and return how many were aborted. A
        second call gets the result of the first.

        Raises:
            ApiError: INVALID_REQUEST (for `drain_seconds`), MODEL_NOT_FOUND, ADAPTER_CONFLICT, REGISTRY_UNAVAILABLE.
        """
        check_drain(drain_seconds)
        if name not in self._owner.records and name in self._draining:
            return await asyncio.shield(self._draining[name])
        with self._loader.names.changing(name):
            served = self._mirror.served.get(name)
            # A hold of this call, so that its own drain time decides:
            hold = self._versions.hold(served.adapter_hash) if served else None
            try:
                await self._remove(name, drain_seconds)
            finally:
                draining = self._mirror.release_hold(name, hold, drain_seconds) if hold else None
        return 0 if draining is None else await self._drained(name, draining)

    async def _remove(self, name: str, drain_seconds: float | None) -> None:
        """Remove an adapter's record, and count its configured source as applied if that is not in the registry yet.
        Raises ApiError as `unload` does."""
        if name not in self._owner.records:
            raise model_not_found(name)
        record = self._owner.records[name]
        seed = await self._seeding.unapplied(name)
        if not seed and not record.generation:
            seed = await self._seeding.seed_text(name, record.source)
        await self._loader.journal.remove(record, drain_seconds, seed=seed)
        self._seeding.waiting.drop(name)
        if self._mirror.records.get(name) is record:
            raise name_conflict(f"the adapter {name!r} was changed by another gateway meanwhile")

    async def _drained(self, name: str, draining: asyncio.Task[int]) -> int:
        self._draining[name] = draining
        try:
            return await asyncio.shield(draining)
        finally:
            if self._draining.get(name) is draining:
                del self._draining[name]
