"""Serves the adapters that the configuration lists, until operators change them. The registry remembers the last
configured source of each name (its seed); a gateway applies only one that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import structlog

from gateway.adapters.loading import AdapterLoader
from gateway.adapters.names import NameOwner
from gateway.adapters.record import AdapterRecord, check_name
from gateway.adapters.templates import AUTO, BASE, FIELD, configured_template, seed_of, source_of
from gateway.adapters.waiting import WaitingSeeds
from gateway.core.errors import ApiError, Fault, invalid_request
from gateway.registry.log import writing
from gateway.registry.store import RecordStore, StoreAway

log = structlog.get_logger("adapters")


ABSENT = Path()
"""Stands for a template of which the configuration says nothing."""
NO_TEMPLATES: Mapping[str, Path | None] = MappingProxyType({})


class AdapterSeeding:
    """Applies the adapters of the configuration to the registry of one base model."""

    def __init__(self, loader: AdapterLoader, store: RecordStore[AdapterRecord], waiting: WaitingSeeds) -> None:
        """`store` remembers the seeds of the registry that `loader` writes; `waiting` lists the adapters that could not
        be loaded."""
        self._loader = loader
        self._owner = loader.owner
        self._mirror = loader.mirror
        self._store = store
        self.waiting = waiting
        self._configured: dict[str, str] = {}
        """Source, by name, of each adapter that the configuration lists."""
        self._templates = NO_TEMPLATES
        """File of the chat template, by adapter name, where the configuration names one, or None for that in the
        adapter's folder."""

    async def seed(self, name: str, source: str) -> str:
        """Serve a configured adapter from `source`, unless operators have changed it since. Return why it cannot be
        served, then listed and tried again in the background, or an empty text. Raises ApiError for its name:
        INVALID_REQUEST, ADAPTER_CONFLICT."""
        # If another base model had it, the adapter moves. If Redis is away, it is served, and written later. If a
        # gateway with another configuration changes it meanwhile, this starts anew.
        self._configured[name] = source
        while True:
            reason = await self._try(name, source)
            if name in self.waiting.expected or not await self._is_due(name, source):  # a change ends the expectation
                return reason

    async def _is_due(self, name: str, source: str) -> bool:
        """Return whether the configuration wants an adapter from `source`, and the registry has never had it so."""
        record = self._mirror.records.get(name)
        if self._configured.get(name) != source or (record is not None and record.source == source):
            return False
        with suppress(StoreAway, ApiError):  # of a template that cannot be read
            return await self._store.seed(name) != seed_of(source, await self._template(name))
        return False

    async def _try(self, name: str, source: str) -> str:
        """Seed an adapter as `seed` does, unless its record changes meanwhile."""
        self.waiting.expect(name, source)
        is_unchanged = self._unchanged(name)
        try:
            await self._seed(name, source, is_unchanged)
        except ApiError as error:
            if error.fault is Fault.ADAPTER_CONFLICT or error.param == "lora_name":
                raise
            record, others = self._mirror.records.get(name), self._loader.names.others(self._owner)
            is_tried = record is not None and record.source == source  # by the mirror
            if is_tried and error.param == FIELD:  # the adapter is served with its former template
                self._mirror.record_error(name, error)
            if is_unchanged() and not is_tried and not any(other.catalog.knows(name) for other in others):
                self.waiting.add(name, source, error.message)
            return error.message
        if is_unchanged():
            self.waiting.drop(name)
        return ""

    def _unchanged(self, name: str) -> Callable[[], bool]:
        """Return a function that returns whether neither the configuration nor an operator has given up an adapter or
        given it another source since this call."""

        def state() -> tuple[AdapterRecord | None, str | None]:
            record = self._mirror.records.get(name)
            return self.waiting.records.get(name), record.source if record else None

        before = state()
        return lambda: state() == before

    async def _seed(self, name: str, source: str, is_unchanged: Callable[[], bool]) -> None:
        """Serve a configured adapter as `seed` does, if the name `is_unchanged` once it is loaded. Raises ApiError as
        `load` does, except ADAPTER_EXISTS and REGISTRY_UNAVAILABLE, and INVALID_REQUEST if this engine failed to load
        it."""
        check_name(name, "lora_name")
        template = await self._template(name)
        seed = seed_of(source, template)
        try:
            applied = await self._store.seed(name)
            if applied != seed:
                if template is None and applied is not None and source_of(applied) != applied:
                    template = BASE  # until now, the configuration named one
                await self._former(name)
                folder = await self._loader.sources.fetch(source)  # may take minutes; operators may change the name
                with self._loader.names.changing(name):
                    await self._apply_seed(name, source, folder, is_unchanged, template, seed)
        except (StoreAway, ApiError) as error:
            if isinstance(error, ApiError) and error.fault is not Fault.REGISTRY_UNAVAILABLE:
                raise
            if name not in self._mirror.records:
                self._loader.names.check(self._owner, name, "lora_name")
                async with self._loader.content(name, source, None, template=template) as content:
                    if is_unchanged():
                        self._loader.journal.keep(content, seed)
        record = self._mirror.records.get(name)
        if record and record.source == source and name not in self._mirror.served:
            if name in self._mirror.errors:
                raise invalid_request(self._mirror.errors[name], "lora_path")
            await self._mirror.load_record(record)  # another gateway has just written it, and its load is under way

    def configure(self, sources: Mapping[str, str], templates: Mapping[str, Path | None] = NO_TEMPLATES) -> None:
        """Learn the source of each configured adapter by name, and the file of its chat template, or None for that of
        its folder. New ones are expected to be applied; those no longer listed are forgotten."""
        for name in self.waiting.expected.keys() - sources.keys():
            self.waiting.drop(name)
        for name, source in sources.items():
            is_same = templates.get(name, ABSENT) == self._templates.get(name, ABSENT)
            if self._configured.get(name) != source or not is_same:
                self.waiting.expect(name, source)
        self._configured, self._templates = dict(sources), dict(templates)

    async def unapplied(self, name: str) -> str:
        """Return the seed of what the configuration wants of an adapter, if the registry does not have it yet. An
        operator's change of the adapter then stores it. Raises ApiError: REGISTRY_UNAVAILABLE."""
        source = self.waiting.expected.get(name)
        if source is None:
            return ""
        seed = await self.seed_text(name, source)
        with writing("adapter"):
            return "" if await self._store.seed(name) == seed else seed

    async def seed_text(self, name: str, source: str) -> str:
        """Return the seed of an adapter that the configuration lists from `source`. A template that cannot be read
        counts as empty."""
        try:
            return seed_of(source, await self._template(name))
        except ApiError:
            return seed_of(source, "")

    async def _template(self, name: str) -> str | None:
        """Return what the configuration says of an adapter's chat template, as `with_template` reads it. Raises
        ApiError: INVALID_REQUEST, its file cannot be read."""
        return await configured_template(self._templates[name]) if name in self._templates else None

    async def _former(self, name: str) -> NameOwner | None:
        """Return the registry of the other base model from which the configuration has moved an adapter here, if any.
        Raises ApiError if the adapter cannot have the name; StoreAway."""
        former = await self._loader.names.seeded_elsewhere(self._owner, name)
        if former is None:
            self._loader.names.check(self._owner, name, "lora_name")
        return former

    async def _apply_seed(
        self,
        name: str,
        source: str,
        folder: Path,
        is_unchanged: Callable[[], bool],
        template: str | None,
        seed: str,
    ) -> None:
        """Load a configured adapter from `folder`, with `template` (see `with_template`), and write its record and
        `seed` if the name `is_unchanged`. One that moved here keeps what operators set, and leaves its other base
        model."""
        previous, former = self._mirror.records.get(name), await self._former(name)
        theirs = former.records[name] if former else None
        if template is None and theirs is not None:
            template = AUTO if theirs.own_template else theirs.chat_template or None
        async with self._loader.content(name, source, previous, folder, template) as record:
            if not is_unchanged():
                return
            if former is None or theirs is None:
                await self._loader.put(record, previous, seed=seed)
                return
            kept = replace(record, aliases=theirs.aliases, tenants=theirs.tenants, pinned=theirs.pinned)
            await self._loader.journal.put(kept, previous, seed=seed)
        await former.give_up(theirs, self._owner.base_model)
        log.info("adapter_moved", adapter=name, base_model=self._owner.base_model, from_base_model=former.base_model)
