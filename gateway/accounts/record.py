"""Registry records of tenants and API keys. Only the SHA-256 of a key is stored; the key itself is shown once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
from redis.asyncio import Redis

from gateway.core.administrators import Administrator
from gateway.core.errors import ApiError, Fault
from gateway.core.key_rules import NO_RULES, KeyRules
from gateway.core.tenants import MAX_WEIGHT, MIN_WEIGHT, Tenant, key_id
from gateway.registry.record import RecordKind
from gateway.registry.store import RedisRecordStore

TENANT, KEY, ADMIN = "tenant", "key", "admin"


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """The name of the tenant that an API key belongs to, the key's label, and what it continues."""

    tenant: str
    label: str = ""
    """An operator's description of what the key is used for."""
    counts_as: str = ""
    """Id of the key from which this one came by rotations, and under which the limits and the use of both are kept.
    Empty means that the key was created and has its own."""
    rules: KeyRules = NO_RULES
    """When the key expires, which models and adapters its requests may name, and the networks they may come from."""


@dataclass(frozen=True, slots=True)
class AdminKey:
    """An administrator, and the SHA-256 of the administrator's key in hex."""

    administrator: Administrator
    key_hash: str


@dataclass(frozen=True, slots=True)
class AccountRecord:
    """Registry record of a tenant (`tenant` is set), of a tenant's API key (`key` is set) or of an administrator
    (`admin` is set). `generation` is the number of the registry's change that wrote it."""

    name: str
    """`tenant/NAME`, `key/SHA-256` (in hex) or `admin/NAME`, so that names of different kinds never collide."""
    created: float
    """Time of creation in Unix seconds. `updated` is the time of the last change."""
    updated: float
    tenant: Tenant | None = None
    key: KeyOwner | None = None
    disabled: bool = False
    source: str = ""
    """For a configured tenant or administrator the settings as JSON, for a configured key the tenant's name and what
    the configuration says of the key, otherwise empty."""
    generation: int = 0
    admin: AdminKey | None = None

    @property
    def aliases(self) -> tuple[str, ...]:
        return ()

    @property
    def is_stripped(self) -> bool:
        """True for an administrator's record of which a gateway that knows no administrators has left only the
        name."""
        return self.tenant is None and self.key is None and self.admin is None

    @property
    def key_hash(self) -> str:
        """SHA-256 of the tenant's or administrator's key in hex; empty for a tenant."""
        if self.admin is not None:
            return self.admin.key_hash
        return self.name.removeprefix(f"{KEY}/") if self.key is not None else ""

    @property
    def key_id(self) -> str:
        return key_id(self.key_hash)

    @property
    def counts_as(self) -> str:
        """Id under which a key's limits and use are kept: its own unless it came by rotations."""
        return (self.key.counts_as if self.key else "") or self.key_id


def tenant_account(tenant: Tenant, now: float, source: str = "") -> AccountRecord:
    return AccountRecord(f"{TENANT}/{tenant.name}", now, now, tenant=tenant, source=source)


def key_account(key_hash: str, owner: KeyOwner, now: float, source: str = "") -> AccountRecord:
    return AccountRecord(f"{KEY}/{key_hash}", now, now, key=owner, source=source)


def admin_account(admin: AdminKey, now: float, source: str = "") -> AccountRecord:
    return AccountRecord(f"{ADMIN}/{admin.administrator.name}", now, now, admin=admin, source=source)


def encode_account(account: AccountRecord) -> bytes:
    return msgspec.json.encode(account)


def decode_account(text: bytes, generation: int) -> AccountRecord:
    """Decode a record from JSON and set its generation, the number of the change that wrote it. A tenant's weight that
    is out of bounds, as old records allowed, is clamped. Raises MsgspecError for other JSON."""
    words = msgspec.json.decode(text)
    if tenant := words.get("tenant"):
        tenant["weight"] = min(max(tenant.get("weight", 1.0), MIN_WEIGHT), MAX_WEIGHT)
    return replace(msgspec.convert(words, AccountRecord), generation=generation)


def name_conflict(message: str) -> ApiError:
    return ApiError(Fault.TENANT_CONFLICT, message)


ACCOUNTS = RecordKind("tenant, key or administrator", encode_account, decode_account, name_conflict)


def account_store(client: Redis, prefix: str = "loralane:") -> RedisRecordStore[AccountRecord]:
    """Return the Redis store of accounts, under keys that begin with `prefix` and `accounts:{all}:` (with braces). It
    holds hashes of API keys only."""
    return RedisRecordStore(client, f"{prefix}accounts:{{all}}:", ACCOUNTS)
