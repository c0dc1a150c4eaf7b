"""Registry of the adapters that are served, with their names and versions. Operators change it, and requests look up
names.

The registry is in Redis, shared by all gateways of a base model; this module is one gateway's access to it. A change is
first written to Redis, unless another gateway has changed the same name meanwhile. It takes effect when it comes back
with the registry's log, here as on every other gateway. So there is one order of changes, and one way in which they
take effect.
"""

from __future__ import annotations

import asyncio
import time
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from engine.core.messages.requests import AdapterHash
from engine.rpc.api import EngineApi
from gateway.adapters.loading import AdapterLoader
from gateway.adapters.mirror import AdapterFetcher, AdapterMirror
from gateway.adapters.names import AdapterNames
from gateway.adapters.own_text import Comparison
from gateway.adapters.record import AdapterRecord, check_name, name_unloaded, tenant_list, with_alias, without_alias
from gateway.adapters.removal import AdapterRemoval
from gateway.adapters.seeding import NO_TEMPLATES, AdapterSeeding
from gateway.adapters.status_reader import StatusReader
from gateway.adapters.templates import source_of
from gateway.adapters.versions import AdapterVersions
from gateway.adapters.waiting import WaitingSeeds
from gateway.api_schema.adapters import AdapterStatus
from gateway.core.errors import ApiError, Fault, invalid_request, model_not_found, unavailable
from gateway.core.routing import Catalog
from gateway.registry.log import RegistryLog
from gateway.registry.store import RecordStore


class AdapterRegistry:
    """One gateway's access to the adapter registry: maps names to adapters, which the engine knows only by content
    hash, and changes the registry for operators."""

    def __init__(
        self,
        engine: EngineApi,
        store: RecordStore[AdapterRecord],
        sources: AdapterFetcher,
        *,
        base_names: tuple[str, ...],
        virtual_names: AbstractSet[str] = frozenset(),
        drain_seconds: float = 30.0,
        compare: Comparison = lambda folder, template: (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            engine: the engine of this gateway.
            store: where the registry is stored.
            sources: finds the files of adapters.
            base_names: names of the base model that the adapters belong to, the canonical one first.
            virtual_names: names of the virtual models that the base model stands for.
            drain_seconds: how long requests may continue with a version that is replaced or unloaded.
            compare: tells what operators should know of the other files in an adapter's folder.
            clock: returns the Unix time in seconds.
        """
        self._store = store
        self.base_model = base_names[0]
        self._base_names = base_names
        self._virtual_names = virtual_names
        self._clock = clock
        self._versions = AdapterVersions(engine)
        self._waiting = WaitingSeeds(self.seed, clock)
        self._mirror = AdapterMirror(self._versions, sources, drain_seconds, self._waiting.drop)
        self._log = RegistryLog(store, self._mirror, "adapter")
        self._loader = AdapterLoader(self, self._mirror, self._versions, self._log, sources, compare, clock)
        self._seeding = AdapterSeeding(self._loader, store, self._waiting)
        self._statuses = StatusReader(self, engine, self._mirror, self._waiting)
        self._removal = AdapterRemoval(self._loader, self._versions, self._seeding)

    @property
    def records(self) -> Mapping[str, AdapterRecord]:
        """Read-only view of the registry's records by adapter name, and of those, without a version, of configured
        adapters that could not be loaded yet."""
        if not self._waiting.records:
            return MappingProxyType(self._mirror.records)
        return ChainMap(self._mirror.records, self._waiting.records)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Read-only view of the adapters' names by alias."""
        return MappingProxyType(self._mirror.aliases)

    @property
    def tenants(self) -> Mapping[str, Collection[str]]:
        """Tenants that may use an adapter, by the adapter's name. Adapters without restriction are not listed."""
        return MappingProxyType(self._mirror.tenants)

    @property
    def catalog(self) -> Catalog:
        """Catalog of the names that requests may ask for: those of the base model, of its virtual models and of its
        adapters. Later changes of the registry appear in it."""
        return Catalog(self._base_names, self.records.keys(), self.aliases, self.tenants, self._virtual_names)

    def chat_template(self, name: str) -> str:
        """Return the template that renders chats of the adapter `name` (no alias); empty means the base model's."""
        return self._mirror.templates.get(name, "")

    @property
    def names(self) -> Mapping[AdapterHash, list[str]]:
        """Names of each version in use; names under which only running requests use the version come last."""
        return self._mirror.names()

    @property
    def next_change(self) -> asyncio.Event:
        """Event that is set at the next change of the registry. Each change replaces it, so fetch it anew."""
        return self._log.next_change

    def share_names(self, names: AdapterNames) -> None:
        """Refuse, from now on, new names that the base models or adapters of other registries in `names` have."""
        self._loader.names = names

    async def has_stored(self, name: str) -> bool:
        return await self._store.knows(name)

    async def seed_of(self, name: str) -> str | None:
        seed = await self._store.seed(name)
        return None if seed is None else source_of(seed)

    async def give_up(self, record: AdapterRecord, taker: str) -> None:
        await self._log.remove(record, None, seed=f"moved to {taker}")

    def is_draining(self, name: str) -> bool:
        """Return whether requests of an adapter that had this name (no alias) still run after its unload."""
        return self._removal.is_draining(name)

    def drain_for(self, seconds: float) -> None:
        """Set how long requests may continue with a version that is replaced or unloaded, in seconds."""
        self._mirror.drain_seconds = seconds

    async def start(self) -> None:
        """Read the registry and follow it in a background task. If Redis is away, the task retries."""
        await self._log.start()

    async def close(self) -> None:
        await self._waiting.close()
        await self._log.close()
        await self._mirror.close()

    async def wait_until_released(self) -> None:
        """Wait until replaced and removed versions have been released, at most until their drain times end."""
        await self._mirror.wait_until_released()

    def pick(self, name: str) -> AdapterRecord:
        """Return the record for a new request that names the adapter `name` (no alias). Its `version` is the one that
        the engine serves now, which may be the previous one. Enter `using` with that version before the next await.

        Raises ApiError: MODEL_NOT_FOUND; ENGINE_UNAVAILABLE, this gateway's engine does not have the adapter.
        """
        record = self.records.get(name)
        if record is None:
            raise model_not_found(name)
        hold = self._mirror.served.get(name)
        if hold is None:  # the error, which may hold paths of the server, is for operators alone
            failed = self._statuses.errors.get(name)
            reason = "it could not be loaded; its operator sees why" if failed else "it is being loaded"
            raise unavailable(Fault.ENGINE_UNAVAILABLE, f"the adapter {name!r} is not available: {reason}")
        return record if hold.adapter_hash == record.version else replace(record, version=hold.adapter_hash)

    def using(self, adapter_hash: AdapterHash | None) -> AbstractContextManager[None]:
        """Return a context manager that counts a request as a user of a version (None: the base model). Until exit the
        version stays in the engine, unless it is replaced or unloaded and its drain time ends first."""
        return self._versions.using(adapter_hash)

    async def load(
        self,
        name: str,
        source: str,
        *,
        replace: bool = False,
        tenants: Collection[str] = (),
        chat_template: str | None = None,
    ) -> AdapterRecord:
        """Serve the adapter at `source` under `name`, for `tenants` only if any are given. Return its record once that
        is in effect here. `replace` allows replacing the adapter of this name.

        Running requests of a replaced version finish in the background. Aliases and pins are kept, and so are tenants
        and the `chat_template` (see `with_template`) if none are given. If the configuration lists the name and was not
        applied yet, it counts as applied.

        Raises:
            ApiError: INVALID_REQUEST, the name, the source or the adapter is not acceptable; ADAPTER_EXISTS, the name
                is taken and `replace` is off; ADAPTER_CONFLICT, another change of this name is under way or was faster;
                ADAPTER_UNLOADED, it was unloaded at once; REGISTRY_UNAVAILABLE; ENGINE_UNAVAILABLE.
        """
        self._loader.names.check(self, name, "lora_name")
        allowed = tenant_list(tenants)
        with self._loader.names.changing(name):
            previous = self._mirror.records.get(name)
            if previous is not None and not replace:
                raise ApiError(Fault.ADAPTER_EXISTS, f"the adapter {name!r} is already loaded", "lora_name")
            seed = await self._seeding.unapplied(name)
            await self._loader.load(name, source, previous, allowed, template=chat_template, seed=seed)
            self._waiting.drop(name)
            return self._kept(name)

    async def reload(self, name: str) -> bool:
        """Read an adapter's source again. Return whether its record changed; new requests then get the new content.
        Raises ApiError: MODEL_NOT_FOUND, and those of `load` except ADAPTER_EXISTS."""
        if name in self._waiting.records:
            if reason := await self.seed(name, self._waiting.records[name].source):
                raise invalid_request(reason, "lora_path")
            return True
        with self._loader.names.changing(name):
            previous = self._known(name)
            return await self._loader.load(name, previous.source, previous) is not previous

    async def unload(self, name: str, drain_seconds: float | None = None) -> int:
        """Remove an adapter, as `AdapterRemoval.unload` says. Return how many of its requests were aborted."""
        return await self._removal.unload(name, drain_seconds)

    async def pin(self, name: str, pinned: bool) -> AdapterRecord:
        """Pin an adapter, so that it is not evicted from the device once it is there, or unpin it. Return its record.
        Raises ApiError: MODEL_NOT_FOUND, ADAPTER_CONFLICT, REGISTRY_UNAVAILABLE."""
        return await self._amend(name, lambda record: replace(record, pinned=pinned))

    async def alias(self, name: str, alias: str, *, remove: bool = False) -> AdapterRecord:
        """Add an alias to an adapter, or remove it. Return the adapter's record.

        Raises ApiError: INVALID_REQUEST for an invalid alias or too many; ADAPTER_CONFLICT if it is taken or another
        change is under way; MODEL_NOT_FOUND for an unknown adapter or alias to remove; REGISTRY_UNAVAILABLE.
        """
        if remove:
            check_name(alias, "alias")
        else:
            self._loader.names.check(self, alias, "alias")
        change = without_alias if remove else with_alias
        return await self._amend(name, lambda record: replace(record, aliases=change(record.aliases, alias)), alias)

    async def allow(self, name: str, tenants: Collection[str]) -> AdapterRecord:
        """Restrict an adapter to some tenants, and return its record. No tenants means that every tenant whose
        configuration allows the adapter may use it. Raises ApiError: INVALID_REQUEST, and those of `pin`."""
        allowed = tenant_list(tenants)
        return await self._amend(name, lambda record: replace(record, tenants=allowed))

    async def seed(self, name: str, source: str) -> str:
        """Serve an adapter that the configuration lists, as `AdapterSeeding.seed` says. Return why that is not
        possible; empty means that it is served."""
        return await self._seeding.seed(name, source)

    def configure(self, sources: Mapping[str, str], templates: Mapping[str, Path | None] = NO_TEMPLATES) -> None:
        """Learn what the configuration lists, as `AdapterSeeding.configure` says. `seed` applies it."""
        self._seeding.configure(sources, templates)

    async def restore(self) -> None:
        """Load all adapters of the registry into a new engine, as `AdapterLoader.restore` says."""
        await self._loader.restore()

    async def statuses(self) -> list[AdapterStatus]:
        """Return the status of all adapters, sorted by name."""
        return await self._statuses.all()

    async def status(self, name: str) -> AdapterStatus:
        """Return the status of the adapter `name` (no alias). Raises ApiError: MODEL_NOT_FOUND."""
        return await self._statuses.one(name, model_not_found)

    async def status_after_change(self, name: str) -> AdapterStatus:
        """Return the status of an adapter that a call has just loaded or changed. Raises ApiError: ADAPTER_UNLOADED,
        another call has unloaded it meanwhile."""
        return await self._statuses.one(name, name_unloaded)

    async def _amend(self, name: str, change: Callable[[AdapterRecord], AdapterRecord], *further: str) -> AdapterRecord:
        """Apply `change` to an adapter's record, and return the new record once it is in effect. Meanwhile, other
        changes of the adapter, or of adapters with one of the names `further`, are refused."""
        with self._loader.names.changing(name, *further):
            previous = self._known(name)
            record = change(previous)
            if record != previous:
                await self._loader.put(replace(record, updated=self._clock()), previous)
            return self._kept(name)

    def _kept(self, name: str) -> AdapterRecord:
        """Return the record of an adapter that was just written. Raises ApiError: ADAPTER_UNLOADED, another gateway has
        removed it meanwhile."""
        if name not in self._mirror.records:
            raise name_unloaded(name)
        return self._mirror.records[name]

    def _known(self, name: str) -> AdapterRecord:
        if name not in self._mirror.records:
            raise model_not_found(name)
        return self._mirror.records[name]
