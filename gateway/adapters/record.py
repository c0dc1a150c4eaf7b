"""What the registry knows of an adapter: the same words for every gateway, and the bytes they are kept as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import msgspec

from engine.core.types import AdapterId
from engine.pb import engine_pb2 as pb


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """One name that is served."""

    name: str
    source: str
    """What an operator gave: a folder, or whatever else the gateway's sources understand. A reload reads it again."""
    path: str
    """Where the gateway that loaded it last found its files."""
    version: AdapterId
    """Content hash: reloading a name with other files gives another version."""
    rank: int
    """The largest of its modules."""
    target_modules: tuple[str, ...]
    pages: int
    """It takes on a device."""
    bytes: int
    """Packed."""
    created: float
    """Unix time in seconds, as `updated`."""
    updated: float
    tenants: tuple[str, ...] = ()
    """Who may use it; empty: every tenant whose configuration lets it."""
    aliases: tuple[str, ...] = ()
    """Other names that lead to it, in order."""
    pinned: bool = False
    """Stays on the device once it is there."""
    generation: int = 0
    """Of the registry when this was written; 0: it is this gateway's alone, the registry has not seen it."""

    def with_content(self, path: str, info: pb.AdapterInfo, now: float) -> AdapterRecord:
        """The same name with what was found at `path`."""
        return replace(
            self,
            path=path,
            version=info.adapter,
            rank=info.rank,
            target_modules=tuple(info.target_modules),
            pages=info.pages,
            bytes=info.bytes,
            updated=now,
        )


def new_record(name: str, source: str, now: float) -> AdapterRecord:
    """A name whose content is still to be read."""
    return AdapterRecord(name, source, "", "", 0, (), 0, 0, created=now, updated=now)


def encode_record(record: AdapterRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_record(text: bytes, generation: int) -> AdapterRecord:
    """The inverse of `encode_record`. Fields a newer gateway wrote and this one does not know are left out."""
    return replace(msgspec.json.decode(text, type=AdapterRecord), generation=generation)


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of the registry's log."""

    generation: int
    name: str
    record: AdapterRecord | None
    """None: the name is gone."""
    drain_seconds: float | None = None
    """What an operator granted the requests of a name that is gone; None: the configured time."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole registry at one generation; generation 0: it has never been written to, or was lost."""

    generation: int = 0
    records: Mapping[str, AdapterRecord] = field(default_factory=lambda: MappingProxyType({}))
