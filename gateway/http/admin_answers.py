"""Response bodies about tenants, keys, limits and usage, as described in /openapi.json."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from gateway.core.tenants import UnknownFields
from gateway.usage.last_minute import TenantUsed

Lane = Literal["interactive", "batch"]


class RequestClass(Struct):
    weight: float
    priority: int
    """Priority of requests that name none."""
    ttft_s: float | None
    """Goals in seconds of requests that set none; null: the lane's."""
    itl_s: float | None


class Tenant(Struct):
    name: str
    default_lane: Lane
    highest_lane: Lane
    adapters: list[str]
    """Patterns of the adapter names that the tenant may use."""
    upstreams: list[str]
    """Patterns of the upstreams that the tenant's data may be sent to."""
    weight: float
    unknown_fields: UnknownFields
    """Handling of request fields that the gateway does not know."""
    classes: dict[str, RequestClass]
    """Classes of its requests, by name, which divide its share of a lane."""
    disabled: bool
    created: float
    updated: float


class Tenants(Struct):
    tenants: list[Tenant]


class DeletedTenant(Struct):
    keys: int
    """Number of keys that were deleted with the tenant."""


class Key(Struct):
    """Metadata of an API key. The key itself is not included; times are in Unix seconds."""

    id: str
    tenant: str
    label: str
    counts_as: str
    """Id of the key under which this key's limits and use are kept: its own or, if it came by rotations, the first
    key's."""
    disabled: bool
    created: float
    updated: float


class NewKey(Key, kw_only=True):
    key: str
    """The key itself. No other response contains it."""


class Keys(Struct):
    keys: list[Key]


class Deleted(Struct):
    deleted: bool


class LimitScope(Struct):
    tenant: str
    key: str
    adapter: str


class ScopeLimits(LimitScope, kw_only=True):
    """Limits of one scope. A value of null means no limit."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    tokens_per_day: int | None
    shadow: list[str]
    """Names of limits that count requests but refuse none."""
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
    """Unix time, in seconds, at which a request was last refused; null if no refusal is remembered."""
    refused_by: list[str]
    """Names of the limits of this scope that caused the last refusal."""


class TenantUse(ScopeUse, kw_only=True):
    running: int
    waiting: int
    reserved_tokens: int
    """Tokens that the tenant's live requests have reserved and may still use."""
    used: TenantUsed | None
    """Use by settled requests, today and in about the last minute; null if nothing is known of this tenant."""


class LimitUses(Struct):
    usage: list[ScopeUse]


class UsageFigures(Struct, kw_only=True):
    """Usage figures. Money is decimal text. `amount` is null without configured prices, `cost` without a configured
    `device_hour`, and `cost_per_million_tokens` without a `cost` or any tokens."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    """The part of prompt_tokens that was found in the prefix cache."""
    completion_tokens: int
    device_seconds: float
    amount: str | None
    """Price of the tokens."""
    cost: str | None
    """Cost of the device time."""
    cost_per_million_tokens: str | None


class UsageLine(UsageFigures, kw_only=True):
    """Usage figures of one group. Fields among tenant, key, adapter, lane and day are absent unless `group_by` names
    them."""

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
