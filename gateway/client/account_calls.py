"""Calls about tenants, keys, limits and usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from gateway.api_schema import accounts as api
from gateway.api_schema import limits as limits_api
from gateway.api_schema import usage as usage_api
from gateway.api_schema.accounts import LimitValues
from gateway.api_schema.common import Deleted
from gateway.client.call import Call


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


def tenants() -> Call[list[api.Tenant]]:
    """Return all tenants."""
    return Call.of(api.LIST_TENANTS, field="tenants")


def tenant(name: str) -> Call[api.Tenant]:
    """Return one tenant."""
    return Call.of(api.GET_TENANT, name)


def create_tenant(name: str, **settings: Unpack[TenantSettings]) -> Call[api.Tenant]:
    """Create a tenant, which has no keys yet."""
    return Call.of(api.CREATE_TENANT, body=api.NewTenantBody(name=name, **_fields(settings)))


def change_tenant(name: str, **settings: Unpack[TenantSettings]) -> Call[api.Tenant]:
    """Change a tenant's settings."""
    return Call.of(api.CHANGE_TENANT, name, body=api.TenantBody(**_fields(settings)))


def _fields(settings: TenantSettings) -> dict[str, Any]:
    """Return settings as the arguments of a tenant's request body, with each class converted to a `ClassBody`."""
    if "classes" not in settings:
        return {**settings}
    return {**settings, "classes": {name: api.ClassBody(**own) for name, own in settings["classes"].items()}}


def delete_tenant(name: str) -> Call[int]:
    """Delete a tenant with its keys, and return how many keys it had."""
    return Call.of(api.DELETE_TENANT, name, field="keys")


def disable_tenant(name: str) -> Call[api.Tenant]:
    """Disable a tenant, so that its requests are refused."""
    return Call.of(api.DISABLE_TENANT, name)


def enable_tenant(name: str) -> Call[api.Tenant]:
    """Enable a disabled tenant."""
    return Call.of(api.ENABLE_TENANT, name)


def keys(tenant: str = "") -> Call[list[api.Key]]:
    """Return the metadata of all API keys, or of those of a tenant."""
    return Call.of(api.LIST_KEYS, query={"tenant": tenant}, field="keys")


def key(key_id: str) -> Call[api.Key]:
    """Return an API key's metadata."""
    return Call.of(api.GET_KEY, key_id)


def create_key(tenant: str, label: str = "") -> Call[api.NewKey]:
    """Create an API key for a tenant, and return it. The key itself cannot be read again later."""
    return Call.of(api.CREATE_KEY, body=api.NewKeyBody(tenant=tenant, label=label))


def rotate_key(key_id: str, *, keep: bool = False) -> Call[api.NewKey]:
    """Replace an API key by a new one. The old one is disabled at once unless `keep`."""
    return Call.of(api.ROTATE_KEY, key_id, body=api.RotateBody(keep=keep))


def disable_key(key_id: str) -> Call[api.Key]:
    """Disable an API key."""
    return Call.of(api.DISABLE_KEY, key_id)


def enable_key(key_id: str) -> Call[api.Key]:
    """Enable a disabled API key."""
    return Call.of(api.ENABLE_KEY, key_id)


def delete_key(key_id: str) -> Call[Deleted]:
    """Delete an API key."""
    return Call.of(api.DELETE_KEY, key_id)


def limits(tenant: str = "") -> Call[list[limits_api.LimitEntry]]:
    """Return the limits of all scopes, or of those of one tenant. A scope is a tenant, one of its keys or its use of an
    adapter."""
    return Call.of(limits_api.LIST, query={"tenant": tenant}, field="limits")


def set_limits(
    tenant: str, *, key: str = "", adapter: str = "", **changes: Unpack[LimitChanges]
) -> Call[limits_api.LimitEntry]:
    """Change limits of a tenant, of one of its keys or of its use of an adapter, from the next request on."""
    return Call.of(limits_api.SET, body=limits_api.SetBody(tenant=tenant, key=key, adapter=adapter, **changes))


def reset_limits(tenant: str, *, key: str = "", adapter: str = "", used: bool = False) -> Call[limits_api.ScopeLimits]:
    """Restore the configured limits of a scope or, with `used`, set its counted use to zero."""
    body = limits_api.ResetBody(tenant=tenant, key=key, adapter=adapter, used=used)
    return Call.of(limits_api.RESET, body=body)


def limits_used(tenant: str = "") -> Call[list[limits_api.ScopeUse]]:
    """Return how much of each limit is used, for all tenants or for one."""
    return Call.of(limits_api.USAGE, query={"tenant": tenant}, field="usage")


def usage(
    *,
    tenant: str = "",
    key: str = "",
    adapter: str = "",
    lane: str = "",
    since: str = "",
    until: str = "",
    group_by: Sequence[str] | None = None,
) -> Call[usage_api.UsageReport]:
    """Return usage, prices and costs from the day `since` to the day `until` (ISO dates in UTC, included), in groups of
    `group_by`: any of tenant, key, adapter, lane and day."""
    query = {"tenant": tenant, "key": key, "adapter": adapter, "lane": lane, "from": since, "to": until}
    groups = None if group_by is None else ",".join(group_by) or usage_api.NO_GROUPS
    return Call.of(usage_api.REPORT, query={**query, "group_by": groups})
