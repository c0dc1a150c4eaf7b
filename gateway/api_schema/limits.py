"""Limits: what operators send and get, and the operations."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.api_schema.common import ACCOUNTS, OF_TENANT
from gateway.api_schema.operation import Operation, admin

LIMITS = "/admin/v1/limits"

Change = int | None | UnsetType


class ScopeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A scope of limits: a tenant, one of its keys or its use of one adapter; at most one of `key` and `adapter` may be
    set. Unknown fields are refused, so that a misspelling cannot leave a tenant without a limit."""

    tenant: str
    key: str = ""
    adapter: str = ""


class SetBody(ScopeBody, kw_only=True):
    """Body of PATCH /admin/v1/limits. Absent fields stay unchanged; null lifts a limit or sets default policies."""

    requests_per_minute: Change = UNSET
    tokens_per_minute: Change = UNSET
    concurrent_requests: Change = UNSET
    tokens_per_day: Change = UNSET
    shadow: list[str] | UnsetType = UNSET
    when_redis_is_away: dict[str, str] | UnsetType | None = UNSET


class ResetBody(ScopeBody, kw_only=True):
    """Body of POST /admin/v1/limits/reset, which restores the configured limits or, with `used`, sets the counted use
    to zero and keeps the limits."""

    used: bool = False


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


class LimitUse(Struct, frozen=True):
    name: str
    limit: int | None
    """Null if use is counted although no limit is set; so is `remaining`."""
    used: float
    """Requests or tokens that count against the limit: in the bucket (limits per minute), running now, or today. A
    value above the limit is debt."""
    remaining: float | None
    reset_seconds: float | None
    """Seconds until the use is zero if nothing is added. Null means that this is unknown."""
    shadow: bool
    refused_today: int
    """Requests of today that did not fit this limit. If the limit is in shadow, they were admitted anyway."""


class ScopeUse(LimitScope, kw_only=True):
    limits: list[LimitUse]
    refused_at: float | None
    """Unix time, in seconds, at which a request was last refused; null if no refusal is remembered."""
    refused_by: list[str]
    """Names of the limits of this scope that caused the last refusal."""


class Used(Struct, frozen=True):
    requests: int
    tokens: int
    """Prompt and completion tokens together."""


class TenantUsed(Struct, frozen=True):
    today: Used
    """Usage since midnight UTC."""
    recently: Used
    """Usage in the last `window_seconds`, by any key, adapter and lane."""
    window_seconds: float
    """Seconds from 0 to 90: about a minute while an operator watches, 0 for the first reading."""


class TenantUse(ScopeUse, kw_only=True):
    running: int
    waiting: int
    reserved_tokens: int
    """Tokens that the tenant's live requests have reserved and may still use."""
    used: TenantUsed | None
    """Use by settled requests, today and in about the last minute; null if nothing is known of this tenant."""


class LimitUses(Struct):
    usage: list[ScopeUse]


LIST = admin("GET", LIMITS, "List the limits of every scope.", LimitEntries, ACCOUNTS, query=OF_TENANT)
SET = admin("PATCH", LIMITS, "Change the limits of a scope.", LimitEntry, ACCOUNTS, body=SetBody)
RESET = admin("POST", LIMITS + "/reset", "Reset a scope's limits or its usage.", ScopeLimits, ACCOUNTS, body=ResetBody)
USAGE = admin("GET", LIMITS + "/usage", "Show how much of each limit is used.", LimitUses, ACCOUNTS, query=OF_TENANT)

OPERATIONS: tuple[Operation[Any], ...] = (LIST, SET, RESET, USAGE)
