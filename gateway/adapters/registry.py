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
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import structlog

from engine.core.messages.requests import AdapterHash
from engine.rpc.api import EngineApi
from engine.rpc.stream import EngineUnavailable
from gateway.adapters.mirror import AdapterFetcher, AdapterMirror
from gateway.adapters.names import AdapterNames, NameOwner
from gateway.adapters.record import (
    AdapterRecord,
    check_drain,
    check_name,
    name_conflict,
    new_record,
    tenant_list,
    with_alias,
    without_alias,
)
from gateway.adapters.status import AdapterStatus, statuses_of
from gateway.adapters.versions import AdapterVersions
from gateway.adapters.waiting import WaitingSeeds
from gateway.core.errors import ApiError, Fault, invalid_request, model_not_found, unavailable
from gateway.core.routing import Catalog
from gateway.registry.log import RegistryLog
from gateway.registry.store import RecordStore, StoreAway

log = structlog.get_logger("adapters")


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
        compare: Callable[[Path], tuple[str, ...]] = lambda folder: (),
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
            compare: returns what operators should know of the other files in an adapter's folder. It may block.
            clock: returns the Unix time in seconds.
        """
        self._engine = engine
        self._store = store
        self._sources = sources
        self.base_model = base_names[0]
        self._base_names = base_names
        self._virtual_names = virtual_names
        self._names = AdapterNames([self])
        self._compare = compare
        self._clock = clock
        self._versions = AdapterVersions(engine)
        self._waiting = WaitingSeeds(self.seed, clock)
        self._mirror = AdapterMirror(self._versions, sources, drain_seconds, self._waiting.drop)
        self._log = RegistryLog(store, self._mirror, "adapter")
        self._draining: dict[str, asyncio.Task[int]] = {}

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
        self._names = names

    async def has_stored(self, name: str) -> bool:
        return await self._store.knows(name)

    async def seed_of(self, name: str) -> str | None:
        return await self._store.seed(name)

    async def give_up(self, record: AdapterRecord, taker: str) -> None:
        await self._log.remove(record, None, seed=f"moved to {taker}")

    def is_draining(self, name: str) -> bool:
        """Return whether requests of an adapter that had this name (no alias) still run after its unload."""
        return name in self._draining

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
            reason = "it could not be loaded; its operator sees why" if self._errors.get(name) else "it is being loaded"
            raise unavailable(Fault.ENGINE_UNAVAILABLE, f"the adapter {name!r} is not available: {reason}")
        return record if hold.adapter_hash == record.version else replace(record, version=hold.adapter_hash)

    def using(self, adapter_hash: AdapterHash | None) -> AbstractContextManager[None]:
        """Return a context manager that counts a request as a user of a version (None: the base model). Until exit the
        version stays in the engine, unless it is replaced or unloaded and its drain time ends first."""
        return self._versions.using(adapter_hash)

    async def load(
        self, name: str, source: str, *, replace: bool = False, tenants: Collection[str] = ()
    ) -> AdapterRecord:
        """Serve the adapter at `source` under `name`, for `tenants` only if any are given. Return its record once that
        is in effect here. `replace` allows replacing the adapter of this name.

        Running requests of a replaced version finish in the background. Aliases and pins are kept, and so are tenants
        if none are given.

        Raises:
            ApiError: INVALID_REQUEST, the name, the source or the adapter is not acceptable; ADAPTER_EXISTS, the name
                is taken and `replace` is off; ADAPTER_CONFLICT, another change of this name is under way or was faster;
                ADAPTER_UNLOADED, it was unloaded at once; REGISTRY_UNAVAILABLE; ENGINE_UNAVAILABLE.
        """
        self._names.check(self, name, "lora_name")
        allowed = tenant_list(tenants)
        with self._names.changing(name):
            previous = self._mirror.records.get(name)
            if previous is not None and not replace:
                raise ApiError(Fault.ADAPTER_EXISTS, f"the adapter {name!r} is already loaded", "lora_name")
            await self._load(name, source, previous, allowed)
            self._waiting.drop(name)
            return self._kept(name)

    async def reload(self, name: str) -> bool:
        """Read an adapter's source again. Return whether its record changed; new requests then get the new content.
        Raises ApiError: MODEL_NOT_FOUND, and those of `load` except ADAPTER_EXISTS."""
        if name in self._waiting.records:
            if reason := await self.seed(name, self._waiting.records[name].source):
                raise invalid_request(reason, "lora_path")
            return True
        with self._names.changing(name):
            previous = self._known(name)
            return await self._load(name, previous.source, previous) is not previous

    async def unload(self, name: str, drain_seconds: float | None = None) -> int:
        """Remove an adapter from the registry, so that new requests are refused, wait for its running requests here,
        and return how many were aborted when the drain time ended. A call while an earlier one still drains returns
        that one's result.

        A configured source that could not be loaded yet counts as applied, so that no gateway loads it later.

        Args:
            name: name of the adapter.
            drain_seconds: 0 to MAX_DRAIN_SECONDS. None means the time configured for all adapters.

        Raises:
            ApiError: INVALID_REQUEST (for `drain_seconds`), MODEL_NOT_FOUND, ADAPTER_CONFLICT, REGISTRY_UNAVAILABLE.
        """
        check_drain(drain_seconds)
        if name not in self.records and name in self._draining:
            return await asyncio.shield(self._draining[name])
        with self._names.changing(name):
            served = self._mirror.served.get(name)
            hold = (
                self._versions.hold(served.adapter_hash) if served else None
            )  # so that this call decides its drain time
            try:
                await self._remove(name, drain_seconds)
            finally:
                draining = self._mirror.release_hold(name, hold, drain_seconds) if hold else None
        return 0 if draining is None else await self._drained(name, draining)

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
            self._names.check(self, alias, "alias")
        change = without_alias if remove else with_alias
        return await self._amend(name, lambda record: replace(record, aliases=change(record.aliases, alias)), alias)

    async def allow(self, name: str, tenants: Collection[str]) -> AdapterRecord:
        """Restrict an adapter to some tenants, and return its record. No tenants means that every tenant whose
        configuration allows the adapter may use it. Raises ApiError: INVALID_REQUEST, and those of `pin`."""
        allowed = tenant_list(tenants)
        return await self._amend(name, lambda record: replace(record, tenants=allowed))

    async def seed(self, name: str, source: str) -> str:
        """Serve an adapter that the configuration lists, from the configured `source`. If the configuration listed it
        with the same source before, changes that operators have made since are kept. If it listed the adapter for
        another base model before, the adapter moves to this one. If Redis is away, this gateway serves the adapter and
        writes it to the registry later.

        Return why the adapter cannot be served, and then list it with that error and try again in the background; empty
        means that it is served. Raises ApiError if it cannot have the name: INVALID_REQUEST, ADAPTER_CONFLICT.
        """
        self._waiting.redirect(name, source)
        is_unchanged = self._unchanged(name)
        try:
            await self._seed(name, source, is_unchanged)
        except ApiError as error:
            if error.fault is Fault.ADAPTER_CONFLICT or error.param == "lora_name":
                raise
            record, others = self._mirror.records.get(name), self._names.others(self)
            is_tried = record is not None and record.source == source  # by the mirror
            if is_unchanged() and not is_tried and not any(other.catalog.knows(name) for other in others):
                self._waiting.add(name, source, error.message)
            return error.message
        if is_unchanged():
            self._waiting.drop(name)
        return ""

    def _unchanged(self, name: str) -> Callable[[], bool]:
        """Return a function that returns whether neither the configuration nor an operator has given up an adapter or
        given it another source since this call."""

        def state() -> tuple[AdapterRecord | None, str | None]:
            record = self._mirror.records.get(name)
            return self._waiting.records.get(name), record.source if record else None

        before = state()
        return lambda: state() == before

    async def _seed(self, name: str, source: str, is_unchanged: Callable[[], bool]) -> None:
        """Serve a configured adapter as `seed` does, if the name `is_unchanged` once it is loaded. Raises
        ApiError: INVALID_REQUEST, also if the registry has the adapter from this source but this gateway's engine could
        not load it; otherwise as `load` does, except ADAPTER_EXISTS and REGISTRY_UNAVAILABLE."""
        check_name(name, "lora_name")
        try:
            if await self._store.seed(name) != source:
                await self._former(name)
                folder = await self._sources.fetch(source)  # may take minutes, in which operators change the name
                with self._names.changing(name):
                    await self._apply_seed(name, source, folder, is_unchanged)
        except (StoreAway, ApiError) as error:
            if isinstance(error, ApiError) and error.fault is not Fault.REGISTRY_UNAVAILABLE:
                raise
            if name not in self._mirror.records:
                self._names.check(self, name, "lora_name")
                async with self._content(name, source, None) as found:
                    if is_unchanged():
                        self._log.keep(found)
        record = self._mirror.records.get(name)
        if record and record.source == source and name not in self._mirror.served:
            if name in self._mirror.errors:
                raise invalid_request(self._mirror.errors[name], "lora_path")
            await self._mirror.load_record(record)  # another gateway has just written it, and its load is under way

    def forget_waiting(self, listed: Collection[str]) -> None:
        """Forget configured adapters that could not be loaded, except those that the configuration still has
        `listed`."""
        for name in self._waiting.records.keys() - set(listed):
            self._waiting.drop(name)

    async def restore(self) -> None:
        """Load all adapters of the registry into a new engine. Returns after one attempt for each adapter. An adapter
        whose files have changed gets a new version. A failure is recorded for `statuses`, and the load is retried in
        the background; if the engine was unavailable, only the next engine's `restore` retries it."""
        self._mirror.restart()
        await asyncio.gather(*(self._restore_or_note(record) for record in tuple(self._mirror.records.values())))

    async def statuses(self) -> list[AdapterStatus]:
        """Return the status of all adapters, sorted by name, with one call to the engine. While the engine is away, all
        have the tier "disk" and no statistics."""
        try:
            adapters = (await self._engine.stats()).adapters
        except EngineUnavailable:
            adapters = ()
        served = {name: hold.adapter_hash for name, hold in self._mirror.served.items()}
        facts = self.base_model, dict(self.records), served, dict(self._errors), tuple(adapters)
        return await asyncio.to_thread(statuses_of, *facts)

    async def status(self, name: str) -> AdapterStatus:
        """Return the status of the adapter `name` (no alias). Raises ApiError: MODEL_NOT_FOUND."""
        found = await self._find(name)
        if found is None:
            raise model_not_found(name)
        return found

    async def status_after_change(self, name: str) -> AdapterStatus:
        """Return the status of an adapter that a call has just loaded or changed. Raises ApiError: ADAPTER_UNLOADED,
        another call has unloaded it meanwhile."""
        found = await self._find(name)
        if found is None:
            raise _unloaded(name)
        return found

    async def _find(self, name: str) -> AdapterStatus | None:
        return next((status for status in await self.statuses() if status.name == name), None)

    async def _load(
        self, name: str, source: str, previous: AdapterRecord | None, tenants: tuple[str, ...] = ()
    ) -> AdapterRecord:
        """Load an adapter into the engine and write its record in place of `previous`, its present record (None: it has
        none). Return the new record. If only the time of change would differ, nothing is written, and `previous` itself
        is returned. Empty `tenants` keep those of `previous`. Raises ApiError as `load` does."""
        async with self._content(name, source, previous) as record:
            record = replace(record, tenants=tenants) if tenants else record
            if previous and record == replace(previous, updated=record.updated):
                if not self._mirror.is_current(previous):
                    self._mirror.put(previous)
                return previous
            await self._put(record, previous)
        return self._mirror.records.get(name, record)

    @asynccontextmanager
    async def _content(
        self, name: str, source: str, previous: AdapterRecord | None, folder: Path | None = None
    ) -> AsyncIterator[AdapterRecord]:
        """Load the adapter at `source` (fetched to `folder`, unless that is None) into the engine, and yield its
        record: a copy of `previous` (None: a new record of `name`) with that source and with the version and sizes that
        the engine reports. On exit, the hold on the version is released. Raises ApiError if a step fails."""
        folder, now = folder or await self._sources.fetch(source), self._clock()
        async with self._versions.loaded(folder) as info:
            base = replace(previous, source=source) if previous else new_record(name, source, now)
            record = base.with_content(str(folder), info, now)
            differences = await asyncio.to_thread(self._compare, folder)
            for difference in differences:
                log.warning("adapter_warning", adapter=name, reason=difference)
            yield replace(record, warnings=(*record.warnings, *differences))

    async def _former(self, name: str) -> NameOwner | None:
        """Return the registry of the other base model from which the configuration has moved an adapter here, if any.
        Raises ApiError if the adapter cannot have the name; StoreAway."""
        former = await self._names.seeded_elsewhere(self, name)
        if former is None:
            self._names.check(self, name, "lora_name")
        return former

    async def _apply_seed(self, name: str, source: str, folder: Path, is_unchanged: Callable[[], bool]) -> None:
        """Load an adapter that the configuration lists from `folder`, where its source was fetched to, and write its
        record if the name `is_unchanged` by then. If the configuration has moved the adapter here from another base
        model, the record takes over the adapter's aliases, tenants and pin, and the registry of the other base model
        then removes the adapter."""
        previous, former = self._mirror.records.get(name), await self._former(name)
        theirs = former.records[name] if former else None
        async with self._content(name, source, previous, folder) as record:
            if not is_unchanged():
                return
            if former is None or theirs is None:
                await self._put(record, previous, seed=source)
                return
            kept = replace(record, aliases=theirs.aliases, tenants=theirs.tenants, pinned=theirs.pinned)
            await self._log.put(kept, previous, seed=source)
        await former.give_up(theirs, self.base_model)
        log.info("adapter_moved", adapter=name, base_model=self.base_model, from_base_model=former.base_model)

    async def _put(self, record: AdapterRecord, previous: AdapterRecord | None, *, seed: str = "") -> None:
        """Write a record in place of `previous`, if no other base model has one of its new names. Raises ApiError as
        `load` does."""
        before = {previous.name, *previous.aliases} if previous else set()
        async with self._names.reserved(self, {record.name, *record.aliases} - before):
            await self._log.put(record, previous, seed=seed)

    async def _remove(self, name: str, drain_seconds: float | None) -> None:
        """Remove an adapter's record, and count its configured source as applied if that is not in the registry yet.
        Raises ApiError as `unload` does."""
        if name not in self.records:
            raise model_not_found(name)
        record, waits = self.records[name], self._waiting.records.get(name)
        configured = waits or record
        await self._log.remove(record, drain_seconds, seed="" if configured.generation else configured.source)
        self._waiting.drop(name)
        if self._mirror.records.get(name) is record:
            raise name_conflict(f"the adapter {name!r} was changed by another gateway meanwhile")

    async def _amend(self, name: str, change: Callable[[AdapterRecord], AdapterRecord], *further: str) -> AdapterRecord:
        """Apply `change` to an adapter's record, and return the new record once it is in effect. Meanwhile, other
        changes of the adapter, or of adapters with one of the names `further`, are refused."""
        with self._names.changing(name, *further):
            previous = self._known(name)
            record = change(previous)
            if record != previous:
                await self._put(replace(record, updated=self._clock()), previous)
            return self._kept(name)

    async def _restore_or_note(self, record: AdapterRecord) -> None:
        try:
            await self._restore(record)
        except ApiError as error:
            self._mirror.record_error(record.name, error)
            if error.fault is not Fault.ENGINE_UNAVAILABLE:  # else `restore` loads everything into the next engine
                self._mirror.start_loading(record.name)

    async def _restore(self, record: AdapterRecord) -> None:
        try:
            await self._mirror.load_record(record)
        except ApiError as error:
            if error.fault is Fault.ENGINE_UNAVAILABLE or self._mirror.records.get(record.name) is not record:
                raise
            log.warning("adapter_changed_on_disk", adapter=record.name, reason=error.message)
            await self._load(record.name, record.source, record)

    async def _drained(self, name: str, draining: asyncio.Task[int]) -> int:
        self._draining[name] = draining
        try:
            return await asyncio.shield(draining)
        finally:
            if self._draining.get(name) is draining:
                del self._draining[name]

    def _kept(self, name: str) -> AdapterRecord:
        """Return the record of an adapter that was just written. Raises ApiError: ADAPTER_UNLOADED, another gateway has
        removed it meanwhile."""
        if name not in self._mirror.records:
            raise _unloaded(name)
        return self._mirror.records[name]

    @property
    def _errors(self) -> Mapping[str, str]:
        """Reason, by adapter name, why this gateway does not serve what the registry or the configuration says."""
        return ChainMap(self._mirror.errors, self._waiting.errors)

    def _known(self, name: str) -> AdapterRecord:
        if name not in self._mirror.records:
            raise model_not_found(name)
        return self._mirror.records[name]


def _unloaded(name: str) -> ApiError:
    message = f"the adapter {name!r} was unloaded while it was being changed; load it again if it is wanted"
    return ApiError(Fault.ADAPTER_UNLOADED, message, "lora_name")
