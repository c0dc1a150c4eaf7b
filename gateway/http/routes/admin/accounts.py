"""The HTTP API for tenants and keys, below /admin/v1/tenants and /admin/v1/keys."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request

from gateway.accounts.admin import AccountAdmin, shown_key, shown_tenant
from gateway.accounts.registry import IssuedKey
from gateway.api_schema import accounts as api
from gateway.api_schema.common import Deleted
from gateway.http.lists import tenant_filter
from gateway.http.routes.admin.from_rows import Answers


class AccountsApi:
    """Handlers of the operations on tenants and keys. `AdminApi` lets only administrators reach them."""

    def __init__(self, admin: AccountAdmin) -> None:
        self._admin = admin
        self._accounts = admin.accounts

    def answers(self) -> Answers:
        return {
            api.LIST_TENANTS: self.tenants,
            api.CREATE_TENANT: self.create,
            api.GET_TENANT: self.show,
            api.CHANGE_TENANT: self.change,
            api.DELETE_TENANT: self.delete,
            api.DISABLE_TENANT: self.disable,
            api.ENABLE_TENANT: self.enable,
            api.LIST_KEYS: self.keys,
            api.CREATE_KEY: self.create_key,
            api.GET_KEY: self.show_key,
            api.DELETE_KEY: self.delete_key,
            api.ROTATE_KEY: self.rotate,
            api.DISABLE_KEY: self.disable_key,
            api.ENABLE_KEY: self.enable_key,
        }

    async def tenants(self, request: Request) -> api.Tenants:
        return api.Tenants([shown_tenant(one) for one in self._accounts.tenants()])

    async def show(self, request: Request) -> api.Tenant:
        return shown_tenant(self._accounts.tenant(request.path_params["name"]))

    async def create(self, request: Request, body: api.NewTenantBody) -> api.Tenant:
        fields = _given(body)
        return shown_tenant(await self._admin.create(fields.pop("name"), fields))

    async def change(self, request: Request, body: api.TenantBody) -> api.Tenant:
        return shown_tenant(await self._admin.change(request.path_params["name"], _given(body)))

    async def delete(self, request: Request) -> api.DeletedTenant:
        return api.DeletedTenant(await self._admin.delete(request.path_params["name"]))

    async def disable(self, request: Request) -> api.Tenant:
        return shown_tenant(await self._accounts.disable(request.path_params["name"], True))

    async def enable(self, request: Request) -> api.Tenant:
        return shown_tenant(await self._accounts.disable(request.path_params["name"], False))

    async def keys(self, request: Request) -> api.Keys:
        return api.Keys([shown_key(one) for one in self._accounts.keys(tenant_filter(request))])

    async def show_key(self, request: Request) -> api.Key:
        return shown_key(self._accounts.key(request.path_params["id"]))

    async def create_key(self, request: Request, body: api.NewKeyBody) -> api.NewKey:
        return _shown_once(await self._accounts.create_key(body.tenant, body.label))

    async def rotate(self, request: Request, body: api.RotateBody) -> api.NewKey:
        return _shown_once(await self._accounts.rotate(request.path_params["id"], keep=body.keep))

    async def disable_key(self, request: Request) -> api.Key:
        return shown_key(await self._accounts.disable_key(request.path_params["id"], True))

    async def enable_key(self, request: Request) -> api.Key:
        return shown_key(await self._accounts.disable_key(request.path_params["id"], False))

    async def delete_key(self, request: Request) -> Deleted:
        await self._accounts.delete_key(request.path_params["id"])
        return Deleted(True)


def _given(body: Struct) -> dict[str, Any]:
    """Return a body's fields as plain data by name, without the fields that the caller left out (UNSET)."""
    fields: dict[str, Any] = msgspec.to_builtins(body)
    return fields


def _shown_once(new: IssuedKey) -> api.NewKey:
    """Return a new key's metadata and the key itself, which no other response contains."""
    return api.NewKey(**msgspec.structs.asdict(shown_key(new.account)), key=new.secret)
