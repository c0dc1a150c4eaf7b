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
    "key": {"type": "string", "description": "Id of a key."},
    "adapter": {"type": "string", "description": "A pattern of names, as in support-*."},
    "lane": {"enum": list(LANES)},
    "from": {**DAY, "description": "First day, in UTC; the first of the month of the last unless it is given."},
    "to": {**DAY, "description": "Last day, included; today unless it is given."},
    "group_by": {
        "type": "string",
        "description": f"Some of {','.join(DIMENSIONS)}, or none; {','.join(DEFAULT_GROUPS)} unless it is given.",
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
    _limits("GET", "", "Limits of every scope.", answers.LimitEntries, query=OF_TENANT),
    _limits("PATCH", "", "Change limits of a scope.", answers.LimitEntry, body=limits.SetBody),
    _limits("POST", "/reset", "Back to the configuration.", answers.ScopeLimits, body=limits.ResetBody),
    _limits("GET", "/usage", "How much is used.", answers.LimitUses, query=OF_TENANT),
    admin(
        "GET",
        usage.USAGE,
        "What was used, and what it is worth.",
        answers.UsageReport,
        frozenset({Fault.INVALID_REQUEST, Fault.LIMITER_UNAVAILABLE}),
        query=USAGE_QUERY,
        text=usage.CSV,
    ),
    admin("GET", accounts.TENANTS, "All tenants.", answers.Tenants, CHANGES),
    admin(
        "POST", accounts.TENANTS, "Create a tenant.", answers.Tenant, CHANGES, body=accounts.NewTenantBody, status=201
    ),
    _tenant("GET", "", "One tenant."),
    _tenant("PATCH", "", "Change a tenant.", body=accounts.TenantBody),
    _tenant("DELETE", "", "Delete a tenant and its keys.", answers.DeletedTenant),
    _tenant("POST", "/disable", "Refuse its requests."),
    _tenant("POST", "/enable", "Serve its requests again."),
    admin("GET", accounts.KEYS, "All keys.", answers.Keys, CHANGES, query=OF_TENANT),
    admin("POST", accounts.KEYS, "Create a key.", answers.NewKey, CHANGES, body=accounts.NewKeyBody, status=201),
    _key("GET", "", "One key."),
    _key("DELETE", "", "Delete a key.", answers.Deleted),
    _key("POST", "/rotate", "Another key in its place.", answers.NewKey, body=accounts.RotateBody, status=201),
    _key("POST", "/disable", "Refuse it."),
    _key("POST", "/enable", "Accept it again."),
)
