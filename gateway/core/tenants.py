"""Who is calling, and what they may use."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Literal, Protocol, get_args

from msgspec import Struct

from engine.core.types import Lane
from gateway.core.errors import forbidden
from gateway.core.limits import NO_LIMITS, Limits

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""Bounds of a tenant's weight. Within them sums and quotients of weights stay exact enough to compare."""
UnknownFields = Literal["ignore", "refuse"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer of this installation."""

    name: str
    default_lane: Lane = Lane.INTERACTIVE
    """Of a request that asks for none."""
    highest_lane: Lane = Lane.INTERACTIVE
    """A request asking for more is served in this one."""
    adapters: tuple[str, ...] = ("*",)
    """Shell-style patterns of adapter names this tenant may use. The base model is everyone's."""
    limits: Limits = NO_LIMITS
    key_limits: Limits = NO_LIMITS
    """Of each of its keys, within `limits`."""
    adapter_limits: Limits = NO_LIMITS
    """Of what it uses of each adapter, and of the base model, within `limits`."""
    weight: float = 1.0
    """Share of the machine against other tenants of the same lane, from MIN_WEIGHT to MAX_WEIGHT."""
    unknown_fields: UnknownFields = "ignore"
    """What becomes of fields of a request that the gateway does not know. Misspellings are refused in any case."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"tenant name {self.name!r} must be 1 to 64 letters, digits, '_', '.' or '-'")
        if self.default_lane < self.highest_lane:
            raise ValueError(f"default_lane {self.default_lane.name.lower()} is above highest_lane")
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise ValueError(f"weight must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, not {self.weight}")
        if self.unknown_fields not in (choices := get_args(UnknownFields)):
            raise ValueError(f"unknown_fields must be one of {', '.join(choices)}, not {self.unknown_fields!r}")

    def may_use(self, adapter: str) -> bool:
        return any(fnmatchcase(adapter, pattern) for pattern in self.adapters)

    def effective_lane(self, asked: Lane | None) -> Lane:
        """What is asked for, or the default, clamped to the highest allowed."""
        return max(self.default_lane if asked is None else asked, self.highest_lane)


ADMIN_TENANT = Tenant("admin")
"""What administrators' keys belong to. It asks for nothing that is limited or billed."""


class Principal(Struct, frozen=True):
    """An authenticated caller."""

    tenant: Tenant
    key_id: str
    """First 12 hex digits of the key's hash: safe to log, enough to tell keys apart."""
    is_admin: bool = False

    def as_tenant(self) -> Principal:
        """Raises ApiError: FORBIDDEN, for an administrator: what is generated is some tenant's, within its limits."""
        if self.is_admin:
            raise forbidden("an administrator's key administers; this needs a tenant's key")
        return self

    def as_admin(self) -> Principal:
        """Raises ApiError: FORBIDDEN, for a tenant."""
        if not self.is_admin:
            raise forbidden("this needs an administrator's key")
        return self


def hash_key(key: str) -> str:
    """SHA-256 in hex. Keys are long random strings, so a slow password hash would add nothing."""
    return hashlib.sha256(key.encode()).hexdigest()


def key_id(key_hash: str) -> str:
    return key_hash[:12]


class Lapse(Enum):
    """Why work that was asked for with a key goes on no more: a code, and what is told."""

    TENANT_GONE = ("tenant_gone", "the tenant that asked for this is no more")
    TENANT_SUSPENDED = ("tenant_suspended", "the tenant that asked for this is suspended")
    KEY_GONE = ("key_revoked", "the API key that asked for this is no more")
    KEY_DISABLED = ("key_revoked", "the API key that asked for this was revoked")

    @property
    def is_certain(self) -> bool:
        """Others may only not have been heard of yet."""
        return self in (Lapse.TENANT_SUSPENDED, Lapse.KEY_DISABLED)


class KeyHolders(Protocol):
    """Whoever knows who a key's work is done for."""

    def holder(self, tenant: str, key_id: str) -> Principal | Lapse:
        """As it is now, of work that was asked for earlier."""


class Authenticator(Protocol):
    """Whoever knows whose a key is."""

    def authenticate(self, token: str | None) -> Principal:
        """Raises ApiError: INVALID_API_KEY. Its message does not repeat the key."""
