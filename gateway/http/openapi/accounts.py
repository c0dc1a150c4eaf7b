"""The operations on tenants, keys, limits and usage. Only administrators can call them."""

from __future__ import annotations

from typing import Any

from gateway.core.errors import Fault
from gateway.http import accounts, limits, usage
from gateway.http import admin_answers as answers
from gateway.http.openapi.operation import Operation, admin
from gateway.usage.report import DEFAULT_GROUPS, DIMENSIONS, LANES

CHANGES = frozenset(
    {
        Fault.INVALID_REQUEST,
        Fault.TENANT_NOT_FOUND,
        Fault.KEY_NOT_FOUND,
        Fault.TENANT_EXISTS,
        Fault.TENANT_CONFLICT,
        Fault.LIMITER_UNAVAILABLE,
        Fault.REGISTRY_UNAVAILABLE,
    }
)
OF_TENANT = {"tenant": {"type": "string"}}
DAY = {"type": "string", "format": "date"}
USAGE_QUERY = {
    **OF_TENANT,
    "key": {"type": "string", "description": "Id of an API key."},
    "adapter": {"type": "string", "description": "Pattern of adapter names, such as support-*."},
    "lane": {"enum": list(LANES)},
    "from": {**DAY, "description": "First day (UTC). The default is the first day of the month of `to`."},
    "to": {**DAY, "description": "Last day (UTC), included. The default is today."},
    "group_by": {
        "type": "string",
        "description": f"Any of {','.join(DIMENSIONS)}, or empty. The default is {','.join(DEFAULT_GROUPS)}.",
    },
    "format": {"enum": list(usage.FORMATS)},
}


def _tenant(method: str, action: str, summary: str, answer: Any = answers.Tenant, **more: Any) -> Operation:
    return admin(method, accounts.TENANT + action, summary, answer, CHANGES, **more)


def _key(method: str, action: str, summary: str, answer: Any = answers.Key, **more: Any) -> Operation:
    return admin(method, accounts.KEY + action, summary, answer, CHANGES, **more)


def _limits(method: str, action: str, summary: str, answer: Any, **more: Any) -> Operation:
    return admin(method, limits.LIMITS + action, summary, answer, CHANGES, **more)


ACCOUNT_OPERATIONS: tuple[Operation, ...] = (
    _limits("GET", "", "List the limits of every scope.", answers.LimitEntries, query=OF_TENANT),
    _limits("PATCH", "", "Change the limits of a scope.", answers.LimitEntry, body=limits.SetBody),
    _limits("POST", "/reset", "Reset a scope's limits or its usage.", answers.ScopeLimits, body=limits.ResetBody),
    _limits("GET", "/usage", "Show how much of each limit is used.", answers.LimitUses, query=OF_TENANT),
    admin(
        "GET",
        usage.USAGE,
        "Report usage, prices and costs.",
        answers.UsageReport,
        frozenset({Fault.INVALID_REQUEST, Fault.LIMITER_UNAVAILABLE}),
        query=USAGE_QUERY,
        text=usage.CSV,
    ),
    admin("GET", accounts.TENANTS, "List all tenants.", answers.Tenants, CHANGES),
    admin(
        "POST", accounts.TENANTS, "Create a tenant.", answers.Tenant, CHANGES, body=accounts.NewTenantBody, status=201
    ),
    _tenant("GET", "", "Get a tenant."),
    _tenant("PATCH", "", "Change a tenant.", body=accounts.TenantBody),
    _tenant("DELETE", "", "Delete a tenant and its keys.", answers.DeletedTenant),
    _tenant("POST", "/disable", "Disable a tenant, so that its requests are refused."),
    _tenant("POST", "/enable", "Enable a disabled tenant."),
    admin("GET", accounts.KEYS, "List API keys.", answers.Keys, CHANGES, query=OF_TENANT),
    admin("POST", accounts.KEYS, "Create an API key.", answers.NewKey, CHANGES, body=accounts.NewKeyBody, status=201),
    _key("GET", "", "Get an API key's metadata."),
    _key("DELETE", "", "Delete an API key.", answers.Deleted),
    _key("POST", "/rotate", "Replace an API key by a new one.", answers.NewKey, body=accounts.RotateBody, status=201),
    _key("POST", "/disable", "Disable an API key."),
    _key("POST", "/enable", "Enable a disabled API key."),
)
