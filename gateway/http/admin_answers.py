"""Response bodies about tenants, keys, limits and usage, as the API's document describes them."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from gateway.core.tenants import UnknownFields
from gateway.usage.last_minute import TenantUsed

Lane = Literal["interactive", "batch"]


class Tenant(Struct):
    name: str
    default_lane: Lane
    highest_lane: Lane
    adapters: list[str]
    """Patterns of the names it may use."""
    weight: float
    unknown_fields: UnknownFields
    """What becomes of fields of its requests that the gateway does not know."""
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
    refused_at: float | None
    """When a request was last refused, in Unix seconds, if that is still remembered."""
    refused_by: list[str]
    """Limits of this scope that it did not fit."""


class TenantUse(ScopeUse, kw_only=True):
    running: int
    waiting: int
    reserved_tokens: int
    """That its live requests may yet use."""
    used: TenantUsed | None
    """What settled requests have used; null where nothing was."""


class LimitUses(Struct):
    usage: list[ScopeUse]


class UsageFigures(Struct, kw_only=True):
    """Money is decimal text: null where the configuration has no prices, or no `device_hour`."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Of prompt_tokens, found in the prefix cache."""
    completion_tokens: int
    device_seconds: float
    amount: str | None
    """What the tokens are sold for."""
    cost: str | None
    """What the device time costs."""
    cost_per_million_tokens: str | None


class UsageLine(UsageFigures, kw_only=True):
    """With those of the first five that `group_by` names."""

    tenant: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    adapter: str | UnsetType = UNSET
    lane: Lane | UnsetType = UNSET
    day: str | UnsetType = UNSET


class UsageReport(Struct):
    since: str = field(name="from")
    until: str = field(name="to")
    group_by: list[str]
    currency: str
    usage: list[UsageLine]
    total: UsageFigures
