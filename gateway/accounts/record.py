"""Tenants and keys as the registry keeps them. A key is its SHA-256: the key itself is shown once and kept nowhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from gateway.core.errors import ApiError, Fault
from gateway.core.tenants import MAX_WEIGHT, MIN_WEIGHT, Tenant, key_id
from gateway.registry.record import Kind

TENANT, KEY = "tenant", "key"


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """What is known of a key."""

    tenant: str
    label: str = ""
    """An operator's words for what it is used for."""


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant, or a key of one."""

    name: str
    """`tenant/NAME` or `key/SHA-256`: the two never meet."""
    created: float
    """Unix time in seconds, as `updated`."""
    updated: float
    tenant: Tenant | None = None
    key: KeyOwner | None = None
    disabled: bool = False
    source: str = ""
    """What the configuration says of it; empty: it was made live."""
    generation: int = 0

    @property
    def aliases(self) -> tuple[str, ...]:
        return ()

    @property
    def key_hash(self) -> str:
        return self.name.removeprefix(f"{KEY}/")

    @property
    def key_id(self) -> str:
        return key_id(self.key_hash)


def tenant_account(tenant: Tenant, now: float, source: str = "") -> Account:
    return Account(f"{TENANT}/{tenant.name}", now, now, tenant=tenant, source=source)


def key_account(key_hash: str, owner: KeyOwner, now: float, source: str = "") -> Account:
    return Account(f"{KEY}/{key_hash}", now, now, key=owner, source=source)


def encode_account(account: Account) -> bytes:
    return msgspec.json.encode(account)


def decode_account(text: bytes, generation: int) -> Account:
    """Read a record. A weight from before weights had bounds is moved to the nearest one."""
    words = msgspec.json.decode(text)
    if tenant := words.get("tenant"):
        tenant["weight"] = min(max(tenant.get("weight", 1.0), MIN_WEIGHT), MAX_WEIGHT)
    return replace(msgspec.convert(words, Account), generation=generation)


def conflict(message: str) -> ApiError:
    return ApiError(Fault.TENANT_CONFLICT, message)


ACCOUNTS = Kind("tenant or key", encode_account, decode_account, conflict)
