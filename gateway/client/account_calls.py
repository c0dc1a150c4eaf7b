"""Calls about tenants, keys, limits and usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from gateway.client.call import Call
from gateway.client.paths import path_part
from gateway.http import admin_answers as answers
from gateway.http.accounts import (
    KEYS,
    TENANTS,
    ClassBody,
    LimitValues,
    NewKeyBody,
    NewTenantBody,
    RotateBody,
    TenantBody,
)
from gateway.http.limits import LIMITS, ResetBody, SetBody
from gateway.http.usage import USAGE


class ClassSettings(TypedDict, total=False):
    """One class of a tenant's requests. Settings that are left out get their default values."""

    weight: float
    priority: int
    ttft_s: float | None
    itl_s: float | None


class TenantSettings(TypedDict, total=False):
    """Settings of a tenant. Those that are left out stay unchanged, or get their default values."""

    default_lane: str
    highest_lane: str
    adapters: list[str]
    upstreams: list[str]
    weight: float
    unknown_fields: str
    classes: dict[str, ClassSettings]
    """All request classes of the tenant, by name; they replace its present ones."""
    limits: LimitValues
    key_limits: LimitValues
    adapter_limits: LimitValues


class LimitChanges(TypedDict, total=False):
    """Changes of limits. Those that are left out stay unchanged; None lifts a limit."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    tokens_per_day: int | None
    shadow: list[str]
    when_redis_is_away: dict[str, str] | None


def tenants() -> Call[list[answers.Tenant]]:
    """Return all tenants."""
    return Call("GET", TENANTS, answers.Tenants, field="tenants")


def tenant(name: str) -> Call[answers.Tenant]:
    """Return one tenant."""
    return Call("GET", _of(TENANTS, name), answers.Tenant)


def create_tenant(name: str, **settings: Unpack[TenantSettings]) -> Call[answers.Tenant]:
    """Create a tenant, which has no keys yet."""
    return Call("POST", TENANTS, answers.Tenant, body=NewTenantBody(name=name, **_fields(settings)))


def change_tenant(name: str, **settings: Unpack[TenantSettings]) -> Call[answers.Tenant]:
    """Change a tenant's settings."""
    return Call("PATCH", _of(TENANTS, name), answers.Tenant, body=TenantBody(**_fields(settings)))


def _fields(settings: TenantSettings) -> dict[str, Any]:
    """Return settings as the arguments of a tenant's request body, with each class converted to a `ClassBody`."""
    if "classes" not in settings:
        return {**settings}
    return {**settings, "classes": {name: ClassBody(**own) for name, own in settings["classes"].items()}}


def delete_tenant(name: str) -> Call[int]:
    """Delete a tenant with its keys, and return how many keys it had."""
    return Call("DELETE", _of(TENANTS, name), answers.DeletedTenant, field="keys")


def disable_tenant(name: str) -> Call[answers.Tenant]:
    """Disable a tenant, so that its requests are refused."""
    return Call("POST", _of(TENANTS, name, "disable"), answers.Tenant)


def enable_tenant(name: str) -> Call[answers.Tenant]:
    """Enable a disabled tenant."""
    return Call("POST", _of(TENANTS, name, "enable"), answers.Tenant)


def keys(tenant: str = "") -> Call[list[answers.Key]]:
    """Return the metadata of all API keys, or of those of a tenant."""
    return Call("GET", KEYS, answers.Keys, {"tenant": tenant}, field="keys")


def key(key_id: str) -> Call[answers.Key]:
    """Return an API key's metadata."""
    return Call("GET", _of(KEYS, key_id), answers.Key)


def create_key(tenant: str, label: str = "") -> Call[answers.NewKey]:
    """Create an API key for a tenant, and return it. The key itself cannot be read again later."""
    return Call("POST", KEYS, answers.NewKey, body=NewKeyBody(tenant=tenant, label=label))


def rotate_key(key_id: str, *, keep: bool = False) -> Call[answers.NewKey]:
    """Replace an API key by a new one. The old one is disabled at once unless `keep`."""
    return Call("POST", _of(KEYS, key_id, "rotate"), answers.NewKey, body=RotateBody(keep=keep))


def disable_key(key_id: str) -> Call[answers.Key]:
    """Disable an API key."""
    return Call("POST", _of(KEYS, key_id, "disable"), answers.Key)


def enable_key(key_id: str) -> Call[answers.Key]:
    """Enable a disabled API key."""
    return Call("POST", _of(KEYS, key_id, "enable"), answers.Key)


def delete_key(key_id: str) -> Call[answers.Deleted]:
    """Delete an API key."""
    return Call("DELETE", _of(KEYS, key_id), answers.Deleted)


def limits(tenant: str = "") -> Call[list[answers.LimitEntry]]:
    """Return the limits of all scopes, or of those of one tenant. A scope is a tenant, one of its keys or its use of an
    adapter."""
    return Call("GET", LIMITS, answers.LimitEntries, {"tenant": tenant}, field="limits")


def set_limits(
    tenant: str, *, key: str = "", adapter: str = "", **changes: Unpack[LimitChanges]
) -> Call[answers.LimitEntry]:
    """Change limits of a tenant, of one of its keys or of its use of an adapter, from the next request on."""
    return Call("PATCH", LIMITS, answers.LimitEntry, body=SetBody(tenant=tenant, key=key, adapter=adapter, **changes))


def reset_limits(tenant: str, *, key: str = "", adapter: str = "", used: bool = False) -> Call[answers.ScopeLimits]:
    """Restore the configured limits of a scope or, with `used`, set its counted use to zero."""
    body = ResetBody(tenant=tenant, key=key, adapter=adapter, used=used)
    return Call("POST", f"{LIMITS}/reset", answers.ScopeLimits, body=body)


def limits_used(tenant: str = "") -> Call[list[answers.ScopeUse]]:
    """Return how much of each limit is used, for all tenants or for one."""
    return Call("GET", f"{LIMITS}/usage", answers.LimitUses, {"tenant": tenant}, field="usage")


def usage(
    *,
    tenant: str = "",
    key: str = "",
    adapter: str = "",
    lane: str = "",
    since: str = "",
    until: str = "",
    group_by: Sequence[str] | None = None,
) -> Call[answers.UsageReport]:
    """Return usage, prices and costs from the day `since` to the day `until` (ISO dates in UTC, included), in groups of
    `group_by`: any of tenant, key, adapter, lane and day."""
    query = {"tenant": tenant, "key": key, "adapter": adapter, "lane": lane, "from": since, "to": until}
    groups = None if group_by is None else ",".join(group_by)
    return Call("GET", USAGE, answers.UsageReport, {**query, "group_by": groups})


def _of(path: str, name: str, action: str = "") -> str:
    return f"{path}/{path_part(name)}" + (f"/{action}" if action else "")
