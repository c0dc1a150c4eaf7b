"""One gateway's copy of the registry, and its engine made to follow it: load the new, switch, release the old."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import structlog

from engine.core.types import AdapterId
from gateway.adapters.record import AdapterRecord
from gateway.adapters.versions import AdapterVersions, Hold
from gateway.core.errors import ApiError, Fault, invalid_request
from gateway.registry.record import Change, Snapshot

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
CONCURRENT_LOADS = 4
"""Enough to keep a disk busy, few enough to leave the engine its cores."""

log = structlog.get_logger("adapters")


class Sources(Protocol):
    """Where adapters' files are found."""

    async def fetch(self, source: str) -> Path:
        """A folder with the files of `source`. Raises ApiError: INVALID_REQUEST, with the reason."""


class AdapterMirror:
    """Changes enter in the order of the registry's log and bind at once: who may use a name, what its aliases are.

    Only a new version takes its time. Until this engine has it, requests go on with the version before; a new name
    has none and is not available yet.
    """

    def __init__(self, versions: AdapterVersions, sources: Sources, drain_seconds: float) -> None:
        self.generation = 0
        self.records: dict[str, AdapterRecord] = {}
        self.aliases: dict[str, str] = {}
        self.tenants: dict[str, tuple[str, ...]] = {}
        """Of the adapters that are not for everybody."""
        self.served: dict[str, Hold] = {}
        """The version that this gateway's engine serves, by name."""
        self.errors: dict[str, str] = {}
        """Why a name is not as the registry wants it."""
        self._leaving: dict[asyncio.Task[int], tuple[AdapterId, str]] = {}
        """Versions that no new request gets, and the name each was served under."""
        self._versions = versions
        self._sources = sources
        self.drain_seconds = drain_seconds
        self._started = False
        """There has been an engine; the first is given what is here by `AdapterRegistry.restore`."""
        self._loads = asyncio.Semaphore(CONCURRENT_LOADS)
        self._bringing: dict[str, asyncio.Event] = {}
        """Names whose version is on its way; set when they have changed again."""
        self._background: set[asyncio.Task[Any]] = set()

    def take(self, change: Change[AdapterRecord]) -> None:
        """One change, the next in the registry's log or this gateway's own."""
        self.generation = max(self.generation, change.generation)
        if change.record is None:
            self._remove(change.name, change.drain_seconds)
        else:
            self.put(change.record)

    def take_all(self, snapshot: Snapshot[AdapterRecord]) -> None:
        """Whatever the registry holds, in place of whatever was here."""
        for name in self.records.keys() - snapshot.records.keys():
            self._remove(name, None)
        for name, record in snapshot.records.items():
            known = self.records.get(name)
            if known is None or known.generation != record.generation:
                self.put(record)
        self.generation = snapshot.generation

    def is_current(self, record: AdapterRecord) -> bool:
        """This gateway serves just what the record says."""
        hold = self.served.get(record.name)
        return hold is not None and hold.version == record.version

    async def bring(self, record: AdapterRecord) -> None:
        """Loads a record's version and serves it: from where its files were last found, else from its source.

        Raises:
            ApiError: INVALID_REQUEST, its files cannot be had, are refused or are others; ENGINE_UNAVAILABLE.
        """
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

    def names(self) -> dict[AdapterId, list[str]]:
        """Every name a version goes by, those last that new requests no longer find it under."""
        names: dict[AdapterId, list[str]] = {}
        served = [(hold.version, name) for name, hold in self.served.items()]
        for version, name in (*served, *self._leaving.values()):
            known = names.setdefault(version, [])
            if name not in known:
                known.append(name)
        return names

    def note(self, name: str, error: ApiError) -> None:
        """Keeps for operators why a name is not as the registry wants it."""
        self.errors[name] = error.message
        log.error("adapter_not_followed", adapter=name, reason=error.message)

    def follow(self, name: str) -> None:
        """Begins to bring a name's version, or to try again at once where that is going on."""
        if not self._started:
            return
        if under_way := self._bringing.get(name):
            under_way.set()
        else:
            self._bringing[name] = asyncio.Event()
            self._spawn(self._keep_bringing(name, self._bringing[name]))

    def restart(self) -> None:
        """The engine is a new one, perhaps the first, and holds nothing."""
        self._started = True
        self._versions.forget()
        self.served.clear()

    async def settle(self) -> None:
        """Waits until versions that were replaced or removed are gone."""
        while self._leaving:
            await asyncio.wait(self._leaving)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def put(self, record: AdapterRecord) -> None:
        """Serves a record at once if the engine has its version, else as soon as it does."""
        name = record.name
        self._rename(name, record)
        if not self.is_current(record):
            hold = self._versions.hold(record.version)
            if hold is None:
                self.follow(name)
                return
            self._switch(name, hold)
        self.errors.pop(name, None)
        self._pin(record.version)

    def leave(self, name: str, hold: Hold, drain_seconds: float | None) -> asyncio.Task[int]:
        """Gives back a hold on what was served under a name; returns how many requests will be aborted for it."""
        seconds = self.drain_seconds if drain_seconds is None else drain_seconds
        task = self._spawn(self._leave(hold, seconds))
        self._leaving[task] = (hold.version, name)
        task.add_done_callback(self._leaving.pop)
        return task

    async def _leave(self, hold: Hold, drain_seconds: float) -> int:
        aborted = await self._versions.release(hold, drain_seconds)
        self._pin(hold.version)
        return aborted

    def _remove(self, name: str, drain_seconds: float | None) -> None:
        self._rename(name, None)
        self.errors.pop(name, None)
        if hold := self.served.pop(name, None):
            self.leave(name, hold, drain_seconds)
        if under_way := self._bringing.get(name):
            under_way.set()

    def _rename(self, name: str, record: AdapterRecord | None) -> None:
        """Puts a record in place of what was there, with all its names."""
        previous = self.records.get(name)
        for alias in previous.aliases if previous else ():
            if self.aliases.get(alias) == name:  # in a whole registry read anew it may be another's by now
                del self.aliases[alias]
        self.tenants.pop(name, None)
        if record is None:
            self.records.pop(name, None)
            return
        self.records[name] = record
        self.aliases |= dict.fromkeys(record.aliases, name)
        if record.tenants:
            self.tenants[name] = record.tenants

    def _switch(self, name: str, hold: Hold) -> None:
        """From this moment on requests get the version held."""
        previous = self.served.get(name)
        self.served[name] = hold
        if previous is not None:
            self.leave(name, previous, None)

    def _pin(self, version: AdapterId) -> None:
        """Asks for what the names of a version say about pins, where the engine does not have it so."""
        if self._wants_pin(version) != self._versions.is_pinned(version):
            self._spawn(self._settle_pin(version))

    async def _settle_pin(self, version: AdapterId) -> None:
        try:
            while (wanted := self._wants_pin(version)) != self._versions.is_pinned(version):
                await self._versions.pin(version, wanted)
        except ApiError as error:
            for name in [name for name, hold in self.served.items() if hold.version == version]:
                self.note(name, error)

    def _wants_pin(self, version: AdapterId) -> bool:
        pinned = (self.served.get(name) for name, record in self.records.items() if record.pinned)
        return any(hold is not None and hold.version == version for hold in pinned)

    async def _keep_bringing(self, name: str, changed: asyncio.Event) -> None:
        """Tries until this gateway serves what the registry says, or the name is gone."""
        delay = FIRST_RETRY_SECONDS
        try:
            while (record := self.records.get(name)) and not self.is_current(record):
                changed.clear()
                try:
                    await self.bring(record)
                except ApiError as error:
                    self.note(name, error)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), delay)
                    delay = min(2 * delay, LAST_RETRY_SECONDS)
        finally:
            del self._bringing[name]

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
