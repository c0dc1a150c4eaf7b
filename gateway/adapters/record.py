"""Registry records of adapters, which are the same for all gateways: names, encoding, and their store in Redis."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

import msgspec
from redis.asyncio import Redis

from engine.core.types import AdapterHash
from engine.pb import engine_pb2 as pb
from gateway.core.errors import ApiError, Fault, invalid_request, model_not_found
from gateway.core.tenants import NAME as TENANT_NAME
from gateway.registry.record import RecordKind
from gateway.registry.store import RedisRecordStore

MAX_DRAIN_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """A name under which an adapter is served."""

    name: str
    source: str
    """Folder or other source that the operator gave, of a kind that the gateway supports. A reload reads it again."""
    path: str
    """Folder where the gateway that loaded the adapter last found its files."""
    version: AdapterHash
    """Content hash. Reloading a name with different files gives a different version."""
    rank: int
    """Largest rank of the adapter's modules."""
    target_modules: tuple[str, ...]
    pages: int
    """Number of pages that the adapter takes on a device."""
    bytes: int
    """Size of the packed adapter in bytes."""
    created: float
    """Unix time in seconds, like `updated`."""
    updated: float
    tenants: tuple[str, ...] = ()
    """Tenants that may use the adapter. Empty means every tenant whose configuration allows it."""
    aliases: tuple[str, ...] = ()
    """Other names of the adapter, in order."""
    pinned: bool = False
    """True if the adapter stays on the device once it is there."""
    generation: int = 0
    """Generation of the registry when the record was written; 0 if the registry does not have this gateway's record."""

    def with_content(self, path: str, info: pb.AdapterInfo, now: float) -> AdapterRecord:
        """Return the record with the content that was found at `path`."""
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
    """Return a record whose content is still to be read."""
    return AdapterRecord(name, source, "", "", 0, (), 0, 0, created=now, updated=now)


def encode_record(record: AdapterRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_record(text: bytes, generation: int) -> AdapterRecord:
    """Decode a record. Unknown fields, which a newer gateway wrote, are ignored."""
    return replace(msgspec.json.decode(text, type=AdapterRecord), generation=generation)


def check_drain(seconds: float | None) -> None:
    """Check the drain time of one unload. Raises ApiError: INVALID_REQUEST."""
    if seconds is not None and not 0 <= seconds <= MAX_DRAIN_SECONDS:
        raise invalid_request(f"drain_seconds must be from 0 to {MAX_DRAIN_SECONDS:g}", "drain_seconds")


def name_conflict(message: str) -> ApiError:
    return ApiError(Fault.ADAPTER_CONFLICT, message, "lora_name")


ADAPTERS = RecordKind("adapter", encode_record, decode_record, name_conflict)


def adapter_store(client: Redis, base: str, prefix: str = "loralane:") -> RedisRecordStore[AdapterRecord]:
    """Return the store under the keys `{prefix}adapters:{base}:`. `base` is the base model of these adapters."""
    return RedisRecordStore(client, f"{prefix}adapters:{{{base}}}:", ADAPTERS)


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")
"""Valid names of adapters and aliases. A colon is not allowed, because a request may name an adapter as
`base:adapter`."""
MAX_ALIASES = 64
"""Maximum number of aliases of one adapter."""


def check_name(name: str, reserved: Collection[str], param: str) -> None:
    """Check the name of an adapter or an alias.

    Args:
        name: the name to check.
        reserved: names of the base model, which are refused.
        param: the request field that the error names.

    Raises:
        ApiError: INVALID_REQUEST, the name is malformed or reserved.
    """
    if not NAME.fullmatch(name):
        rule = "1 to 128 letters, digits, '_', '.', '-' or '/', beginning with a letter or digit"
        raise invalid_request(f"{param} must be {rule}", param)
    if name in reserved:
        raise invalid_request(f"{name!r} is the name of the base model", param)


def tenant_list(tenants: Collection[str]) -> tuple[str, ...]:
    """Return tenant names sorted and without duplicates. Raises ApiError: INVALID_REQUEST, if a name is malformed."""
    for tenant in tenants:
        if not TENANT_NAME.fullmatch(tenant):
            raise invalid_request(f"{tenant!r} is no name of a tenant", "tenants")
    return tuple(sorted(set(tenants)))


def with_alias(aliases: Collection[str], alias: str) -> tuple[str, ...]:
    """Return the aliases with one added, sorted. Raises ApiError: INVALID_REQUEST, if they exceed MAX_ALIASES."""
    if len({*aliases, alias}) > MAX_ALIASES:
        raise invalid_request(f"an adapter has at most {MAX_ALIASES} aliases", "alias")
    return tuple(sorted({*aliases, alias}))


def without_alias(aliases: Collection[str], alias: str) -> tuple[str, ...]:
    """Return the aliases with one removed, sorted. Raises ApiError: MODEL_NOT_FOUND, if it is not among them."""
    if alias not in aliases:
        raise model_not_found(alias)
    return tuple(sorted(set(aliases) - {alias}))
