"""The service loralane.v1.TenantAdmin, for administrators' keys."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.accounts.admin import AccountAdmin, shown_key, shown_tenant
from gateway.accounts.record import AccountRecord
from gateway.accounts.registry import IssuedKey
from gateway.pb import tenants_pb2 as pb
from gateway.pb import tenants_pb2_grpc as pb_grpc
from gateway.rpc.calls import RpcCall


class TenantAdminService(pb_grpc.TenantAdminServicer):
    def __init__(self, admin: AccountAdmin) -> None:
        self._admin = admin
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
        return _new_key(await self._accounts.create_key(request.tenant, request.label))

    async def ListKeys(self, request: pb.ListKeysRequest, call: RpcCall) -> pb.ListKeysResponse:  # noqa: N802
        return pb.ListKeysResponse(keys=map(_key, self._accounts.keys(request.tenant)))

    async def RotateKey(self, request: pb.RotateKeyRequest, call: RpcCall) -> pb.NewKey:  # noqa: N802
        return _new_key(await self._accounts.rotate(request.id, keep=request.keep))

    async def DisableKey(self, request: pb.DisableKeyRequest, call: RpcCall) -> pb.Key:  # noqa: N802
        return _key(await self._accounts.disable_key(request.id, not request.enable))

    async def DeleteKey(self, request: pb.DeleteKeyRequest, call: RpcCall) -> pb.DeleteKeyResponse:  # noqa: N802
        await self._accounts.delete_key(request.id)
        return pb.DeleteKeyResponse()


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


def _key(account: AccountRecord) -> pb.Key:
    return pb.Key(**msgspec.structs.asdict(shown_key(account)))


def _new_key(new: IssuedKey) -> pb.NewKey:
    return pb.NewKey(key=_key(new.account), secret=new.secret)
