"""Tenants and their keys: what operators send and get, and the operations."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from gateway.api_schema.common import ACCOUNTS, OF_TENANT, Deleted
from gateway.api_schema.operation import Operation, admin
from gateway.core.lanes import LaneName
from gateway.core.tenants import UnknownFields

TENANTS = "/admin/v1/tenants"
TENANT = TENANTS + "/{name}"
KEYS = "/admin/v1/keys"
KEY = KEYS + "/{id}"

LimitValues = dict[str, int | list[str] | dict[str, str] | None]


class ClassBody(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One class of a tenant's requests. Absent fields get their default values."""

    weight: float = 1.0
    priority: int = 0
    ttft_s: float | None = None
    itl_s: float | None = None


class TenantBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of PATCH /admin/v1/tenants/NAME. Absent fields stay unchanged."""

    default_lane: str | UnsetType = UNSET
    highest_lane: str | UnsetType = UNSET
    adapters: list[str] | UnsetType = UNSET
    upstreams: list[str] | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    unknown_fields: str | UnsetType = UNSET
    classes: dict[str, ClassBody] | UnsetType = UNSET
    """All classes of the tenant, by name, in place of those that it has."""
    limits: LimitValues | UnsetType = UNSET
    key_limits: LimitValues | UnsetType = UNSET
    adapter_limits: LimitValues | UnsetType = UNSET


class NewTenantBody(TenantBody, kw_only=True):
    """Body of POST /admin/v1/tenants. Absent fields get their default values."""

    name: str


class NewKeyBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /admin/v1/keys, which creates a key for a tenant."""

    tenant: str
    label: str = ""


class RotateBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /admin/v1/keys/ID/rotate. The old key is disabled at once unless `keep` is true."""

    keep: bool = False


class RequestClass(Struct):
    weight: float
    priority: int
    """Priority of requests that name none."""
    ttft_s: float | None
    """Goals in seconds of requests that set none; null: the lane's."""
    itl_s: float | None


class Tenant(Struct):
    name: str
    default_lane: LaneName
    highest_lane: LaneName
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


def _tenant(method: str, action: str, summary: str) -> Operation[Tenant]:
    return admin(method, TENANT + action, summary, Tenant, ACCOUNTS)


def _key(method: str, action: str, summary: str) -> Operation[Key]:
    return admin(method, KEY + action, summary, Key, ACCOUNTS)


LIST_TENANTS = admin("GET", TENANTS, "List all tenants.", Tenants, ACCOUNTS)
CREATE_TENANT = admin("POST", TENANTS, "Create a tenant.", Tenant, ACCOUNTS, body=NewTenantBody, status=201)
GET_TENANT = _tenant("GET", "", "Get a tenant.")
CHANGE_TENANT = admin("PATCH", TENANT, "Change a tenant.", Tenant, ACCOUNTS, body=TenantBody)
DELETE_TENANT = admin("DELETE", TENANT, "Delete a tenant and its keys.", DeletedTenant, ACCOUNTS)
DISABLE_TENANT = _tenant("POST", "/disable", "Disable a tenant, so that its requests are refused.")
ENABLE_TENANT = _tenant("POST", "/enable", "Enable a disabled tenant.")
LIST_KEYS = admin("GET", KEYS, "List API keys.", Keys, ACCOUNTS, query=OF_TENANT)
CREATE_KEY = admin("POST", KEYS, "Create an API key.", NewKey, ACCOUNTS, body=NewKeyBody, status=201)
GET_KEY = _key("GET", "", "Get an API key's metadata.")
DELETE_KEY = admin("DELETE", KEY, "Delete an API key.", Deleted, ACCOUNTS)
ROTATE_KEY = admin(
    "POST",
    KEY + "/rotate",
    "Replace an API key by a new one.",
    NewKey,
    ACCOUNTS,
    body=RotateBody,
    body_is_optional=True,
    status=201,
)
DISABLE_KEY = _key("POST", "/disable", "Disable an API key.")
ENABLE_KEY = _key("POST", "/enable", "Enable a disabled API key.")

OPERATIONS: tuple[Operation[Any], ...] = (
    LIST_TENANTS,
    CREATE_TENANT,
    GET_TENANT,
    CHANGE_TENANT,
    DELETE_TENANT,
    DISABLE_TENANT,
    ENABLE_TENANT,
    LIST_KEYS,
    CREATE_KEY,
    GET_KEY,
    DELETE_KEY,
    ROTATE_KEY,
    DISABLE_KEY,
    ENABLE_KEY,
)
