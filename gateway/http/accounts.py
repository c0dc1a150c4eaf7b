"""The HTTP API for tenants and keys, below /admin/v1/tenants and /admin/v1/keys."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from gateway.accounts.admin import AccountAdmin, key_json, tenant_json
from gateway.accounts.registry import IssuedKey
from gateway.http.edge import RouteEntry, read_body
from gateway.http.lists import tenant_filter
from gateway.http.stream import json_response
from gateway.openai.parse import Body, parse

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


class AccountsApi:
    """Handlers of the routes for tenants and keys. `AdminApi` creates them and lets only administrators reach them."""

    def __init__(self, admin: AccountAdmin, max_body_bytes: int) -> None:
        self._admin = admin
        self._accounts = admin.accounts
        self._max_body_bytes = max_body_bytes

    def table(self) -> list[RouteEntry]:
        """Return (method, path, handler) for each route; `AdminApi` makes the routes from them."""
        return [
            ("GET", TENANTS, self.tenants),
            ("POST", TENANTS, self.create),
            ("GET", TENANT, self.show),
            ("PATCH", TENANT, self.change),
            ("DELETE", TENANT, self.delete),
            ("POST", TENANT + "/disable", self.disable),
            ("POST", TENANT + "/enable", self.enable),
            ("GET", KEYS, self.keys),
            ("POST", KEYS, self.create_key),
            ("GET", KEY, self.show_key),
            ("DELETE", KEY, self.delete_key),
            ("POST", KEY + "/rotate", self.rotate),
            ("POST", KEY + "/disable", self.disable_key),
            ("POST", KEY + "/enable", self.enable_key),
        ]

    async def tenants(self, request: Request) -> Response:
        return json_response({"tenants": [tenant_json(one) for one in self._accounts.tenants()]})

    async def show(self, request: Request) -> Response:
        return json_response(tenant_json(self._accounts.tenant(request.path_params["name"])))

    async def create(self, request: Request) -> Response:
        fields = _given(await self._body(request, NewTenantBody))
        return json_response(tenant_json(await self._admin.create(fields.pop("name"), fields)), 201)

    async def change(self, request: Request) -> Response:
        fields = _given(await self._body(request, TenantBody))
        return json_response(tenant_json(await self._admin.change(request.path_params["name"], fields)))

    async def delete(self, request: Request) -> Response:
        return json_response({"keys": await self._admin.delete(request.path_params["name"])})

    async def disable(self, request: Request) -> Response:
        return json_response(tenant_json(await self._accounts.disable(request.path_params["name"], True)))

    async def enable(self, request: Request) -> Response:
        return json_response(tenant_json(await self._accounts.disable(request.path_params["name"], False)))

    async def keys(self, request: Request) -> Response:
        found = self._accounts.keys(tenant_filter(request))
        return json_response({"keys": [key_json(one) for one in found]})

    async def show_key(self, request: Request) -> Response:
        return json_response(key_json(self._accounts.key(request.path_params["id"])))

    async def create_key(self, request: Request) -> Response:
        body = await self._body(request, NewKeyBody)
        return _shown_once(await self._accounts.create_key(body.tenant, body.label))

    async def rotate(self, request: Request) -> Response:
        keep = (await self._body(request, RotateBody, b"{}")).keep
        return _shown_once(await self._accounts.rotate(request.path_params["id"], keep=keep))

    async def disable_key(self, request: Request) -> Response:
        return json_response(key_json(await self._accounts.disable_key(request.path_params["id"], True)))

    async def enable_key(self, request: Request) -> Response:
        return json_response(key_json(await self._accounts.disable_key(request.path_params["id"], False)))

    async def delete_key(self, request: Request) -> Response:
        await self._accounts.delete_key(request.path_params["id"])
        return json_response({"deleted": True})

    async def _body(self, request: Request, kind: type[Body], empty: bytes = b"") -> Body:
        return parse(await read_body(request, self._max_body_bytes) or empty, kind)


def _given(body: Struct) -> dict[str, Any]:
    """Return a body's fields as plain data by name, without the fields that the caller left out (UNSET)."""
    fields: dict[str, Any] = msgspec.to_builtins(body)
    return fields


def _shown_once(new: IssuedKey) -> Response:
    """Return the response (201) with a new key's metadata and the key itself, which no other response contains."""
    return json_response({**key_json(new.account), "key": new.secret}, 201)
