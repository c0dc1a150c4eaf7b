"""The service loralane.v1.TenantAdmin, for administrators' keys."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.accounts.admin import AccountAdmin, shown_tenant
from gateway.accounts.keys import KeyAdmin, shown_key
from gateway.accounts.record import AccountRecord
from gateway.accounts.registry import IssuedKey
from gateway.api_schema import accounts as api
from gateway.core.errors import invalid_request
from gateway.pb import tenants_pb2 as pb
from gateway.pb import tenants_pb2_grpc as pb_grpc
from gateway.rpc.calls import RpcCall


class TenantAdminService(pb_grpc.TenantAdminServicer):
    def __init__(self, admin: AccountAdmin) -> None:
        self._admin = admin
        self._keys = KeyAdmin(admin.accounts)
        self._accounts = admin.accounts

    async def CreateTenant(self, request: pb.CreateTenantRequest, call: RpcCall) -> pb.Tenant:  # noqa: N802
        return _tenant(await self._admin.create(request.name, _fields(request.fields)))

    async def GetTenant(self, request: pb.GetTenantRequest, call: RpcCall) -> pb.Tenant:  # noqa: N802
        return _tenant(self._accounts.tenant(request.name))

    async def ListTenants(  # noqa: N802
        self, request: pb.ListTenantsRequest, call: RpcCall
    ) -> pb.ListTenantsResponse:
        return pb.ListTenantsResponse(tenants=map(_tenant, self._accounts.tenants()))

    async def UpdateTenant(self, request: pb.UpdateTenantRequest, call: RpcCall) -> pb.Tenant:  # noqa: N802
        return _tenant(await self._admin.change(request.name, _fields(request.fields)))

    async def DisableTenant(self, request: pb.DisableTenantRequest, call: RpcCall) -> pb.Tenant:  # noqa: N802
        return _tenant(await self._accounts.disable(request.name, not request.enable))

    async def DeleteTenant(self, request: pb.DeleteTenantRequest, call: RpcCall) -> pb.DeleteTenantResponse:  # noqa: N802
        return pb.DeleteTenantResponse(keys=await self._admin.delete(request.name))

    async def CreateKey(self, request: pb.CreateKeyRequest, call: RpcCall) -> pb.NewKey:  # noqa: N802
        fields = {"label": request.label, **_key_fields(request.fields)}
        return _new_key(await self._keys.create(request.tenant, fields))

    async def GetKey(self, request: pb.GetKeyRequest, call: RpcCall) -> pb.Key:  # noqa: N802
        return await self._key(self._accounts.key(request.id))

    async def UpdateKey(self, request: pb.UpdateKeyRequest, call: RpcCall) -> pb.Key:  # noqa: N802
        return await self._key(await self._keys.change(request.id, _key_fields(request.fields)))

    async def ListKeys(self, request: pb.ListKeysRequest, call: RpcCall) -> pb.ListKeysResponse:  # noqa: N802
        found = await self._keys.shown(self._accounts.keys(request.tenant))
        return pb.ListKeysResponse(keys=map(_key_to_pb, found))

    async def RotateKey(self, request: pb.RotateKeyRequest, call: RpcCall) -> pb.NewKey:  # noqa: N802
        ends: float | UnsetType | None = request.expires_at if request.HasField("expires_at") else UNSET
        if request.never_expires:
            ends = None
        new = await self._keys.rotate(request.id, keep=request.keep, overlap_s=request.overlap_s, expires_at=ends)
        return _new_key(new)

    async def DisableKey(self, request: pb.DisableKeyRequest, call: RpcCall) -> pb.Key:  # noqa: N802
        return await self._key(await self._accounts.disable_key(request.id, not request.enable))

    async def DeleteKey(self, request: pb.DeleteKeyRequest, call: RpcCall) -> pb.DeleteKeyResponse:  # noqa: N802
        await self._accounts.delete_key(request.id)
        return pb.DeleteKeyResponse()

    async def _key(self, account: AccountRecord) -> pb.Key:
        return _key_to_pb(await self._keys.shown_one(account))


def _fields(fields: pb.TenantFields) -> dict[str, Any]:
    names = ("default_lane", "highest_lane", "weight", "unknown_fields")
    given = {name: getattr(fields, name) for name in names if fields.HasField(name)}
    if fields.set_adapters or fields.adapters:
        given["adapters"] = list(fields.adapters)
    if fields.set_upstreams or fields.upstreams:
        given["upstreams"] = list(fields.upstreams)
    if fields.set_classes or fields.classes:
        given["classes"] = {name: _class_fields(own) for name, own in fields.classes.items()}
    return given


def _class_fields(own: pb.RequestClass) -> dict[str, Any]:
    return {field.name: value for field, value in own.ListFields()}


def _tenant(account: AccountRecord) -> pb.Tenant:
    return pb.Tenant(**msgspec.to_builtins(shown_tenant(account)))


def _key_fields(fields: pb.KeyFields) -> dict[str, Any]:
    """Return the fields of a key that a request gives, by name. Raises ApiError (INVALID_REQUEST) if both times
    are."""
    given: dict[str, Any] = {name: getattr(fields, name) for name in ("label", "expires_at") if fields.HasField(name)}
    if fields.never_expires:
        if "expires_at" in given:
            raise invalid_request("expires_at and never_expires exclude each other", "never_expires")
        given["expires_at"] = None
    for name in ("models", "adapters", "networks"):
        if getattr(fields, f"set_{name}") or getattr(fields, name):
            given[name] = list(getattr(fields, name))
    return given


def _key_to_pb(key: api.Key) -> pb.Key:
    return pb.Key(**msgspec.structs.asdict(key))


def _new_key(new: IssuedKey) -> pb.NewKey:
    return pb.NewKey(key=_key_to_pb(shown_key(new.account)), secret=new.secret)
