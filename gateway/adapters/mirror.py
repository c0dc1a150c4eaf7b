"""A gateway's copy of the adapter registry. It makes the gateway's engine follow it: load the new version, switch
requests to it, release the old one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import structlog

from engine.core.messages.requests import AdapterHash
from gateway.adapters.record import AdapterRecord
from gateway.adapters.versions import AdapterVersions, VersionHold
from gateway.core.errors import ApiError, Fault, invalid_request
from gateway.registry.record import RecordChange, RegistrySnapshot

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
CONCURRENT_LOADS = 4
"""Maximum number of concurrent loads: enough to keep a disk busy, but few enough to leave the engine its cores."""

log = structlog.get_logger("adapters")


class AdapterFetcher(Protocol):
    """Makes the files of adapters available in local folders."""

    async def fetch(self, source: str) -> Path:
        """Return a local folder with the files of `source` (see `AdapterRecord.source`), downloading them if necessary.
        Raises ApiError (INVALID_REQUEST) with the reason."""


class AdapterMirror:
    """`Mirror` of the adapter registry, which also makes this gateway's engine follow it, in the order of the log.
    Until the engine has loaded a new version, requests use the previous one; other changes apply at once."""

    def __init__(
        self,
        versions: AdapterVersions,
        sources: AdapterFetcher,
        drain_seconds: float,
        on_new_source: Callable[[str], object],
    ) -> None:
        """`on_new_source` is called with the name of each adapter that the registry gives another source or removes."""
        self.generation = 0
        self.records: dict[str, AdapterRecord] = {}
        self.aliases: dict[str, str] = {}
        self.tenants: dict[str, tuple[str, ...]] = {}
        """Tenants that may use an adapter, by the adapter's name. Adapters without restriction are not listed."""
        self.templates: dict[str, str] = {}
        """Chat template by adapter name: that of the version that `served` holds, or that of the record if it holds
        none. Base models' templates are not listed."""
        self.served: dict[str, VersionHold] = {}
        """Hold on the version that this gateway's engine serves to new requests, by adapter name."""
        self.errors: dict[str, str] = {}
        """Reason, by adapter name, why this gateway does not serve the version that the registry has."""
        self._leaving: dict[asyncio.Task[int], tuple[AdapterHash, str]] = {}
        """Running releases of versions that no new request gets, each with the version and the name that served it."""
        self._versions = versions
        self._sources = sources
        self.drain_seconds = drain_seconds
        self._on_new_source = on_new_source
        self._started = False
        """True once an engine has started. `AdapterRegistry.restore` loads the adapters known by then into the first
        engine."""
        self._loads = asyncio.Semaphore(CONCURRENT_LOADS)
        self._bringing: dict[str, asyncio.Event] = {}
        """One event for each name whose version is being loaded. Setting the event ends the pause before a retry."""
        self._background: set[asyncio.Task[Any]] = set()

    def apply_change(self, change: RecordChange[AdapterRecord]) -> None:
        """Apply a change of the registry's log: put or remove one record, and take over its generation."""
        self.generation = max(self.generation, change.generation)
        if change.record is None:
            self._remove(change.name, change.drain_seconds)
        else:
            self.put(change.record)

    def apply_snapshot(self, snapshot: RegistrySnapshot[AdapterRecord]) -> None:
        """Replace all records by those of a snapshot of the registry. Records of an unchanged generation stay as they
        are."""
        for name in self.records.keys() - snapshot.records.keys():
            self._remove(name, None)
        for name, record in snapshot.records.items():
            known = self.records.get(name)
            if known is None or known.generation != record.generation:
                self.put(record)
        self.generation = snapshot.generation

    def is_current(self, record: AdapterRecord) -> bool:
        """Return whether this gateway's engine serves the version in the record under the record's name."""
        hold = self.served.get(record.name)
        return hold is not None and hold.adapter_hash == record.version

    async def load_record(self, record: AdapterRecord) -> None:
        """Load a record's files into the engine, and serve them if they are the version that the registry has now. At
        most CONCURRENT_LOADS run. Raises ApiError: INVALID_REQUEST for missing, refused or other files;
        ENGINE_UNAVAILABLE."""
        async with self._loads:
            for place in (record.path, record.source):
                try:
                    await self._bring_from(place, record)
                except ApiError as error:
                    if error.fault is Fault.ENGINE_UNAVAILABLE or place == record.source:
                        raise
                else:
                    return

    async def _bring_from(self, place: str, record: AdapterRecord) -> None:
        async with self._versions.loaded(await self._sources.fetch(place)) as info:
            wanted = self.records.get(record.name)
            if wanted is not None and wanted.version == info.adapter:
                self.put(wanted)
            elif wanted is not None and wanted.version == record.version:
                message = f"{place} holds version {info.adapter[:12]}, not {record.version[:12]}; reload it"
                raise invalid_request(message, "lora_path")

    def names(self) -> dict[AdapterHash, list[str]]:
        """Return all names of each version. Names under which only running requests still use the version come last."""
        names: dict[AdapterHash, list[str]] = {}
        served = [(hold.adapter_hash, name) for name, hold in self.served.items()]
        for adapter_hash, name in (*served, *self._leaving.values()):
            known = names.setdefault(adapter_hash, [])
            if name not in known:
                known.append(name)
        return names

    def record_error(self, name: str, error: ApiError) -> None:
        """Store and log for operators why this gateway does not serve what the registry has under a name."""
        self.errors[name] = error.message
        log.error("adapter_not_followed", adapter=name, reason=error.message)

    def start_loading(self, name: str) -> None:
        """Start a background task that loads the registry's version of the adapter `name`, with retries. If the task is
        running already, end its pause before the next retry. Does nothing before the first engine has started."""
        if not self._started:
            return
        if under_way := self._bringing.get(name):
            under_way.set()
        else:
            self._bringing[name] = asyncio.Event()
            self._spawn(self._keep_bringing(name, self._bringing[name]))

    def restart(self) -> None:
        """Forget all holds and served versions: a new engine, perhaps the first, has started and has no adapters."""
        self._started = True
        self._versions.forget()
        self.served.clear()

    async def wait_until_released(self) -> None:
        """Wait until all replaced and removed versions have been released, at most until their drain times end."""
        while self._leaving:
            await asyncio.wait(self._leaving)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def put(self, record: AdapterRecord) -> None:
        """Store a record with its aliases and tenants, and serve its version: at once if the engine has it, else as
        soon as a background task has loaded it."""
        name = record.name
        self._rename(name, record)
        if not self.is_current(record):
            hold = self._versions.hold(record.version)
            if hold is None:
                if name not in self.served:  # requests that wait for the version are rendered for it
                    self._set_template(record)
                self.start_loading(name)
                return
            self._switch(name, hold)
        self._set_template(record)
        self.errors.pop(name, None)
        self._pin(record.version)

    def release_hold(self, name: str, hold: VersionHold, drain_seconds: float | None) -> asyncio.Task[int]:
        """Start releasing a hold on a version that was served under `name`. The returned task's result is the number of
        requests aborted at the end of the drain time; a drain time of None means the configured one."""
        seconds = self.drain_seconds if drain_seconds is None else drain_seconds
        task = self._spawn(self._release(hold, seconds))
        self._leaving[task] = (hold.adapter_hash, name)
        task.add_done_callback(self._leaving.pop)
        return task

    async def _release(self, hold: VersionHold, drain_seconds: float) -> int:
        aborted = await self._versions.release(hold, drain_seconds)
        self._pin(hold.adapter_hash)
        return aborted

    def _set_template(self, record: AdapterRecord) -> None:
        self.templates.pop(record.name, None)
        if record.chat_template:
            self.templates[record.name] = record.chat_template

    def _remove(self, name: str, drain_seconds: float | None) -> None:
        self._rename(name, None)
        self.errors.pop(name, None)
        self.templates.pop(name, None)
        if hold := self.served.pop(name, None):
            self.release_hold(name, hold, drain_seconds)
        if under_way := self._bringing.get(name):
            under_way.set()

    def _rename(self, name: str, record: AdapterRecord | None) -> None:
        """Replace the record, aliases and tenants of a name. A record of None removes them."""
        previous = self.records.get(name)
        if record is None or previous is None or previous.source != record.source:
            self._on_new_source(name)
        for alias in previous.aliases if previous else ():
            if self.aliases.get(alias) == name:  # in a new snapshot the alias may belong to another name by now
                del self.aliases[alias]
        self.tenants.pop(name, None)
        if record is None:
            self.records.pop(name, None)
            return
        self.records[name] = record
        self.aliases |= dict.fromkeys(record.aliases, name)
        if record.tenants:
            self.tenants[name] = record.tenants

    def _switch(self, name: str, hold: VersionHold) -> None:
        """Serve the held version to new requests under a name, and release the previous version."""
        previous = self.served.get(name)
        self.served[name] = hold
        if previous is not None:
            self.release_hold(name, previous, None)

    def _pin(self, adapter_hash: AdapterHash) -> None:
        """Start a task that pins or unpins a version in the engine, if its pin differs from what the records demand."""
        if self._wants_pin(adapter_hash) != self._versions.is_pinned(adapter_hash):
            self._spawn(self._sync_pin(adapter_hash))

    async def _sync_pin(self, adapter_hash: AdapterHash) -> None:
        try:
            while (wanted := self._wants_pin(adapter_hash)) != self._versions.is_pinned(adapter_hash):
                await self._versions.pin(adapter_hash, wanted)
        except ApiError as error:
            for name in [name for name, hold in self.served.items() if hold.adapter_hash == adapter_hash]:
                self.record_error(name, error)

    def _wants_pin(self, adapter_hash: AdapterHash) -> bool:
        pinned = (self.served.get(name) for name, record in self.records.items() if record.pinned)
        return any(hold is not None and hold.adapter_hash == adapter_hash for hold in pinned)

    async def _keep_bringing(self, name: str, changed: asyncio.Event) -> None:
        """Load the version of a name until this gateway serves what the registry has, or the name is removed. After a
        failure, which is recorded, wait 1 to 60 s, or until `changed` is set."""
        delay = FIRST_RETRY_SECONDS
        try:
            while (record := self.records.get(name)) and not self.is_current(record):
                changed.clear()
                try:
                    await self.load_record(record)
                except ApiError as error:
                    self.record_error(name, error)
                except Exception:  # a bug: without a retry, this gateway would never serve the adapter
                    log.exception("adapter_not_followed", adapter=name)
                    self.errors[name] = "loading it failed unexpectedly; the gateway's log has the details"
                else:
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await changed.wait()
                delay = min(2 * delay, LAST_RETRY_SECONDS)
        finally:
            del self._bringing[name]

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
