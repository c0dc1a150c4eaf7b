"""Response bodies about tenants, keys and limits, as the API's document describes them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Lane = Literal["interactive", "batch"]


class Tenant(Struct):
    name: str
    default_lane: Lane
    highest_lane: Lane
    adapters: list[str]
    """Patterns of the names it may use."""
    weight: float
    disabled: bool
    created: float
    updated: float


class Tenants(Struct):
    tenants: list[Tenant]


class DeletedTenant(Struct):
    keys: int
    """That went with it."""


class Key(Struct):
    """A key, which is never shown."""

    id: str
    tenant: str
    label: str
    disabled: bool
    created: float
    updated: float


class NewKey(Key, kw_only=True):
    key: str
    """The key itself, shown this once."""


class Keys(Struct):
    keys: list[Key]


class Deleted(Struct):
    deleted: bool


class LimitScope(Struct):
    tenant: str
    key: str
    adapter: str


class ScopeLimits(LimitScope, kw_only=True):
    """null: no limit."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    tokens_per_day: int | None
    shadow: list[str]
    """Those that count and refuse nothing."""
    when_redis_is_away: dict[str, str]


class LimitEntry(ScopeLimits, kw_only=True):
    source: Literal["config", "live"]


class LimitEntries(Struct):
    limits: list[LimitEntry]


class LimitUse(Struct):
    name: str
    limit: int | None
    used: float
    remaining: float | None
    reset_seconds: float | None
    shadow: bool
    refused_today: int


class ScopeUse(LimitScope, kw_only=True):
    limits: list[LimitUse]


class LimitUses(Struct):
    usage: list[ScopeUse]
