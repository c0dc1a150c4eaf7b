"""What operators see of an adapter: the registry's word and the engine's, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from engine.core.types import AdapterId
from engine.pb import engine_pb2 as pb
from gateway.adapters.record import AdapterRecord

NOTHING = pb.AdapterStats(state="disk")
"""What an engine that is away, or does not have a version, says about it."""


class AdapterStatus(msgspec.Struct, frozen=True):
    """One name, as this gateway serves it now. Fields that `AdapterRecord` has too mean the same.

    A Struct, as thousands are made for one list: a frozen dataclass of so many fields takes ten times as long to make.
    """

    name: str
    aliases: tuple[str, ...]
    tier: str
    """disk, fetching, host or resident: of the version served."""
    version: AdapterId
    served_version: AdapterId
    """What requests get here: `version`, the one before while that is being loaded, or empty: none."""
    rank: int
    bytes: int
    pages: int
    running: int
    """Requests of this version in this gateway's engine, by whichever name."""
    waiting: int
    hits: int
    """Requests that found it on the device."""
    loads: int
    """Copies to the device."""
    fetches: int
    """Reads from disk."""
    last_load_seconds: float
    last_fetch_seconds: float
    idle_seconds: float | None
    """Since a request last used it; None: none did."""
    pinned: bool
    tenants: tuple[str, ...]
    target_modules: tuple[str, ...]
    source: str
    path: str
    created: float
    updated: float
    generation: int
    error: str
    """Why this gateway does not serve what the registry says; empty: it does."""


def statuses_of(
    records: Mapping[str, AdapterRecord],
    served: Mapping[str, AdapterId],
    errors: Mapping[str, str],
    adapters: Iterable[pb.AdapterStats],
) -> list[AdapterStatus]:
    """In order of names. `served`, `errors`: by name; `adapters`: what the engine says of its versions."""
    stats = {adapter.adapter: adapter for adapter in adapters}
    return [
        _status(record, served.get(name, ""), errors.get(name, ""), stats.get(served.get(name, ""), NOTHING))
        for name, record in sorted(records.items())
    ]


def _status(record: AdapterRecord, served: AdapterId, error: str, engine: pb.AdapterStats) -> AdapterStatus:
    return AdapterStatus(
        name=record.name,
        aliases=record.aliases,
        tier=engine.state,
        version=record.version,
        served_version=served,
        rank=record.rank,
        bytes=record.bytes,
        pages=record.pages,
        running=engine.running,
        waiting=engine.waiting,
        hits=engine.hits,
        loads=engine.loads,
        fetches=engine.fetches,
        last_load_seconds=engine.last_load_seconds,
        last_fetch_seconds=engine.last_fetch_seconds,
        idle_seconds=engine.idle_seconds if engine.HasField("idle_seconds") else None,
        pinned=record.pinned,
        tenants=record.tenants,
        target_modules=record.target_modules,
        source=record.source,
        path=record.path,
        created=record.created,
        updated=record.updated,
        generation=record.generation,
        error=error,
    )


STATUS_FIELDS = AdapterStatus.__struct_fields__
