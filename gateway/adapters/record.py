"""What the registry knows of an adapter: the same words for every gateway, and the bytes they are kept as."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from engine.core.types import AdapterId
from engine.pb import engine_pb2 as pb
from gateway.core.errors import ApiError, Fault, invalid_request
from gateway.registry.record import Kind

MAX_DRAIN_SECONDS = 86_400.0


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


def check_drain(seconds: float | None) -> None:
    """Of one adapter's own drain. Raises ApiError: INVALID_REQUEST."""
    if seconds is not None and not 0 <= seconds <= MAX_DRAIN_SECONDS:
        raise invalid_request(f"drain_seconds must be from 0 to {MAX_DRAIN_SECONDS:g}", "drain_seconds")


def conflict(message: str) -> ApiError:
    return ApiError(Fault.ADAPTER_CONFLICT, message, "lora_name")


ADAPTERS = Kind("adapter", encode_record, decode_record, conflict)
