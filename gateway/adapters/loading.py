"""Loads adapters into a gateway's engine: new content, whose record is then written to the registry, and after a
restart of the engine all that the registry has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import structlog

from gateway.adapters.mirror import AdapterFetcher, AdapterMirror
from gateway.adapters.names import AdapterNames, NameOwner
from gateway.adapters.own_text import Comparison
from gateway.adapters.record import AdapterRecord, name_conflict, new_record
from gateway.adapters.templates import with_template
from gateway.adapters.versions import AdapterVersions
from gateway.core.errors import ApiError, Fault
from gateway.registry.log import RegistryLog

log = structlog.get_logger("adapters")


class AdapterLoader:
    """Loads adapters into the engine of one gateway, and writes their records to the registry of a base model."""

    def __init__(
        self,
        owner: NameOwner,
        mirror: AdapterMirror,
        versions: AdapterVersions,
        journal: RegistryLog[AdapterRecord],
        sources: AdapterFetcher,
        compare: Comparison,
        clock: Callable[[], float],
    ) -> None:
        """`owner` is the registry whose records `journal` writes; `compare` and `clock` are those of
        `AdapterRegistry`."""
        self.owner = owner
        self.mirror = mirror
        self.journal = journal
        self.sources = sources
        self.names = AdapterNames([owner])
        """Names of the adapters of all base models of this gateway."""
        self._versions = versions
        self._compare = compare
        self.clock = clock

    async def restore(self) -> None:
        """Load all adapters of the registry into a new engine, trying each once; changed files get a new version.
        Failures are recorded for `statuses`, and retried in the background or, if the engine was away, by the next
        `restore`."""
        self.mirror.restart()
        await asyncio.gather(*(self._restore_or_note(record) for record in tuple(self.mirror.records.values())))

    async def load(
        self,
        name: str,
        source: str,
        previous: AdapterRecord | None,
        tenants: tuple[str, ...] = (),
        *,
        template: str | None = None,
        seed: str = "",
    ) -> AdapterRecord:
        """Load an adapter into the engine, and return its new record, written in place of `previous`; an unchanged one,
        without `seed`, is not written. Empty `tenants` and a `template` of None keep those of `previous`. Raises
        ApiError as `AdapterRegistry.load` does."""
        async with self.content(name, source, previous, template=template) as record:
            record = replace(record, tenants=tenants) if tenants else record
            if previous and not seed and record == replace(previous, updated=record.updated):
                if not self.mirror.is_current(previous):
                    self.mirror.put(previous)
                return previous
            if not await self.put(record, previous, seed=seed):
                raise name_conflict(f"another gateway has just loaded the adapter {name!r} from its configured source")
        return self.mirror.records.get(name, record)

    @asynccontextmanager
    async def content(
        self,
        name: str,
        source: str,
        previous: AdapterRecord | None,
        folder: Path | None = None,
        template: str | None = None,
    ) -> AsyncIterator[AdapterRecord]:
        """Load the adapter at `source` (fetched to `folder`, unless None) into the engine, and yield its record:
        `previous` (None: a new one) with the engine's version and sizes and the `template`. The exit releases the
        version. Raises ApiError."""
        folder, now = folder or await self.sources.fetch(source), self.clock()
        async with self._versions.loaded(folder) as info:
            base = replace(previous, source=source) if previous else new_record(name, source, now)
            record = await with_template(base.with_content(str(folder), info, now), folder, template)
            differences = await asyncio.to_thread(self._compare, folder, record.chat_template)
            for difference in differences:
                log.warning("adapter_warning", adapter=name, reason=difference)
            yield replace(record, warnings=(*record.warnings, *differences))

    async def put(self, record: AdapterRecord, previous: AdapterRecord | None, *, seed: str = "") -> bool:
        """Write a record in place of `previous`, if no other base model has one of its new names. Return False, having
        written nothing, if a given `seed` is stored already. Raises ApiError as `load` does."""
        before = {previous.name, *previous.aliases} if previous else set()
        async with self.names.reserved(self.owner, {record.name, *record.aliases} - before):
            return await self.journal.put(record, previous, seed=seed)

    async def _restore_or_note(self, record: AdapterRecord) -> None:
        try:
            await self._restore(record)
        except ApiError as error:
            self.mirror.record_error(record.name, error)
            if error.fault is not Fault.ENGINE_UNAVAILABLE:  # else `restore` loads everything into the next engine
                self.mirror.start_loading(record.name)

    async def _restore(self, record: AdapterRecord) -> None:
        try:
            await self.mirror.load_record(record)
        except ApiError as error:
            if error.fault is Fault.ENGINE_UNAVAILABLE or self.mirror.records.get(record.name) is not record:
                raise
            log.warning("adapter_changed_on_disk", adapter=record.name, reason=error.message)
            await self.load(record.name, record.source, record)
