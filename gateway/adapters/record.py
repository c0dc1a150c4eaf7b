"""Registry records of adapters, which all gateways share: their names, encoding, and store in Redis."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import msgspec
from redis.asyncio import Redis

from engine.core.messages.requests import AdapterHash
from engine.pb import engine_pb2 as pb
from gateway.api_schema.adapters import MAX_DRAIN_SECONDS
from gateway.core.errors import ApiError, Fault, invalid_request, model_not_found
from gateway.core.names import ADAPTER_NAME, TENANT_NAME
from gateway.registry.record import RecordKind
from gateway.registry.store import RedisRecordStore


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """Registry record of a name under which an adapter is served. `version` is the hash of the adapter's content,
    `generation` the number of the registry's change that wrote the record."""

    name: str
    source: str
    """Folder, hub id or URL that the operator gave (see `AdapterSources.fetch`). A reload reads the source again."""
    path: str
    """Local folder where the gateway that loaded the adapter last found its files."""
    version: AdapterHash
    """Content hash (adapter_hash). Reloading a name with different files gives a different version."""
    rank: int
    """Largest rank of the adapter's modules."""
    target_modules: tuple[str, ...]
    pages: int
    """Number of memory pages that the adapter takes on a device."""
    bytes: int
    """Size of the packed adapter in bytes."""
    created: float
    """Time of creation in Unix seconds. `updated` is the time of the last change."""
    updated: float
    tenants: tuple[str, ...] = ()
    """Tenants that may use the adapter. Empty means every tenant whose configuration allows it."""
    aliases: tuple[str, ...] = ()
    """Other names under which requests may ask for the adapter, sorted."""
    pinned: bool = False
    """True if the adapter is not evicted from the device once it is there."""
    generation: int = 0
    """Number of the registry's change that wrote the record; 0 if the registry does not have it."""
    warnings: tuple[str, ...] = ()
    """What operators should know of the adapter although it is served."""
    chat_template: str = ""
    """Template that renders chats of the adapter. Empty means that of the base model."""
    own_template: bool = False
    """True means that `chat_template` is the one in the adapter's folder, and read again with its content."""

    def with_content(self, path: str, info: pb.AdapterInfo, now: float) -> AdapterRecord:
        """Return a copy with `path`, the folder of the files, and what the engine says of their content. `now` is in
        Unix seconds."""
        return replace(
            self,
            path=path,
            version=info.adapter,
            rank=info.rank,
            target_modules=tuple(info.target_modules),
            pages=info.pages,
            bytes=info.bytes,
            updated=now,
            warnings=tuple(info.warnings),
        )


def new_record(name: str, source: str, now: float) -> AdapterRecord:
    """Return a new record with an empty version, to be filled by `with_content`. `now` is in Unix seconds."""
    return AdapterRecord(name, source, "", "", 0, (), 0, 0, created=now, updated=now)


def encode_record(record: AdapterRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_record(text: bytes, generation: int) -> AdapterRecord:
    """Decode a record from JSON and set its generation. Fields that a newer gateway added are ignored."""
    return replace(msgspec.json.decode(text, type=AdapterRecord), generation=generation)


def check_drain(seconds: float | None) -> None:
    """Raise ApiError (INVALID_REQUEST) unless `seconds` is None or from 0 to MAX_DRAIN_SECONDS."""
    if seconds is not None and not 0 <= seconds <= MAX_DRAIN_SECONDS:
        raise invalid_request(f"drain_seconds must be from 0 to {MAX_DRAIN_SECONDS:g}", "drain_seconds")


def name_conflict(message: str, param: str = "lora_name") -> ApiError:
    return ApiError(Fault.ADAPTER_CONFLICT, message, param)


def name_unloaded(name: str) -> ApiError:
    message = f"the adapter {name!r} was unloaded while it was being changed; load it again if it is wanted"
    return ApiError(Fault.ADAPTER_UNLOADED, message, "lora_name")


ADAPTERS = RecordKind("adapter", encode_record, decode_record, name_conflict)


def adapter_store(client: Redis, base: str, prefix: str = "loralane:") -> RedisRecordStore[AdapterRecord]:
    """Return the Redis store of a base model's adapter records, under keys that begin with `prefix` and
    `adapters:{BASE}:` (with braces)."""
    return RedisRecordStore(client, f"{prefix}adapters:{{{base}}}:", ADAPTERS)


MAX_ALIASES = 64
"""Maximum number of aliases of one adapter."""


def check_name(name: str, param: str) -> None:
    """Raise ApiError (INVALID_REQUEST) if the name of an adapter or alias is malformed. `param` is the request field
    that the error names."""
    if not ADAPTER_NAME.fits(name):
        raise invalid_request(f"{param} must be {ADAPTER_NAME.words}", param)


def tenant_list(tenants: Collection[str]) -> tuple[str, ...]:
    """Return tenant names sorted and without duplicates. Raises ApiError (INVALID_REQUEST) if a name is malformed."""
    for tenant in tenants:
        if not TENANT_NAME.fits(tenant):
            raise invalid_request(f"{tenant[:80]!r} is no name of a tenant", "tenants")
    return tuple(sorted(set(tenants)))


def with_alias(aliases: Collection[str], alias: str) -> tuple[str, ...]:
    """Return the aliases with `alias` added, sorted. Raises ApiError (INVALID_REQUEST) for more than MAX_ALIASES."""
    if len({*aliases, alias}) > MAX_ALIASES:
        raise invalid_request(f"an adapter has at most {MAX_ALIASES} aliases", "alias")
    return tuple(sorted({*aliases, alias}))


def without_alias(aliases: Collection[str], alias: str) -> tuple[str, ...]:
    """Return the aliases with `alias` removed, sorted. Raises ApiError (MODEL_NOT_FOUND) if it is not among them."""
    if alias not in aliases:
        raise model_not_found(alias)
    return tuple(sorted(set(aliases) - {alias}))
