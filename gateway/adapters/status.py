"""Status of adapters for operators, combined from the registry and the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from engine.core.messages.requests import AdapterHash
from engine.pb import engine_pb2 as pb
from engine.process.adapter_files import is_place
from gateway.adapters.record import AdapterRecord
from gateway.adapters.templates import template_name
from gateway.api_schema.adapters import AdapterStatus

NOTHING = pb.AdapterStats(state="disk")
"""Statistics of a version that the engine does not have, or of any version while the engine is away."""


def statuses_of(
    base_model: str,
    records: Mapping[str, AdapterRecord],
    served: Mapping[str, AdapterHash],
    errors: Mapping[str, str],
    adapters: Iterable[pb.AdapterStats],
) -> list[AdapterStatus]:
    """Return the status of all names in `records`, sorted. `served` maps a name to the version that new requests get,
    `errors` to the reason why none is served; `adapters` has one entry for each version. Blocks: it looks for files."""
    stats = {adapter.adapter: adapter for adapter in adapters}
    return [
        _status(
            base_model, record, served.get(name, ""), errors.get(name, ""), stats.get(served.get(name, ""), NOTHING)
        )
        for name, record in sorted(records.items())
    ]


def _status(
    base_model: str, record: AdapterRecord, served: AdapterHash, error: str, engine: pb.AdapterStats
) -> AdapterStatus:
    return AdapterStatus(
        name=record.name,
        base_model=base_model,
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
        error=error or _missing_files(record, engine),
        warnings=record.warnings,
        chat_template=template_name(record),
    )


def _missing_files(record: AdapterRecord, engine: pb.AdapterStats) -> str:
    """Return why the engine, which has evicted an adapter, could not read it again; empty if it has it, or could."""
    if engine.state != "disk" or not engine.adapter:
        return ""
    if not is_place(Path(record.path)):
        return f"{record.path} is gone, and the engine has evicted the adapter: put its files back, or load it again"
    return f"the engine could not read the adapter again: {engine.error}" if engine.error else ""
