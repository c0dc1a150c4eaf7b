"""The service loralane.v1.TenantAdmin, for administrators' keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from grpc.aio import ServicerContext as Context

from gateway.accounts.admin import AccountAdmin, key_json, tenant_json
from gateway.accounts.record import AccountRecord
from gateway.accounts.registry import IssuedKey
from gateway.core.tenants import Authenticator
from gateway.pb import tenants_pb2 as pb
from gateway.pb import tenants_pb2_grpc as pb_grpc
from gateway.rpc.calls import RpcCall, respond_to_admin

T = TypeVar("T")


class TenantAdminService(pb_grpc.TenantAdminServicer):
    def __init__(self, admin: AccountAdmin, keys: Authenticator) -> None:
        self._admin = admin
        self._accounts = admin.accounts
        self._keys = keys

    async def CreateTenant(self, request: pb.CreateTenantRequest, context: Context) -> pb.Tenant:  # noqa: N802
        return await self._do(context, lambda: self._create(request))

    async def GetTenant(self, request: pb.GetTenantRequest, context: Context) -> pb.Tenant:  # noqa: N802
        return await self._do(context, lambda: self._get(request))

    async def ListTenants(  # noqa: N802
        self, request: pb.ListTenantsRequest, context: Context
    ) -> pb.ListTenantsResponse:
        return await self._do(context, self._list)

    async def UpdateTenant(self, request: pb.UpdateTenantRequest, context: Context) -> pb.Tenant:  # noqa: N802
        return await self._do(context, lambda: self._update(request))

    async def DisableTenant(self, request: pb.DisableTenantRequest, context: Context) -> pb.Tenant:  # noqa: N802
        return await self._do(context, lambda: self._disable(request))

    async def DeleteTenant(  # noqa: N802
        self, request: pb.DeleteTenantRequest, context: Context
    ) -> pb.DeleteTenantResponse:
        return await self._do(context, lambda: self._delete(request))

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.NewKey:  # noqa: N802
        return await self._do(context, lambda: self._create_key(request))

    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:  # noqa: N802
        return await self._do(context, lambda: self._list_keys(request))

    async def RotateKey(self, request: pb.RotateKeyRequest, context: Context) -> pb.NewKey:  # noqa: N802
        return await self._do(context, lambda: self._rotate(request))

    async def DisableKey(self, request: pb.DisableKeyRequest, context: Context) -> pb.Key:  # noqa: N802
        return await self._do(context, lambda: self._disable_key(request))

    async def DeleteKey(self, request: pb.DeleteKeyRequest, context: Context) -> pb.DeleteKeyResponse:  # noqa: N802
        return await self._do(context, lambda: self._delete_key(request))

    async def _do(self, context: Context, work: Callable[[], Awaitable[T]]) -> T:
        def admitted(call: RpcCall) -> Awaitable[T]:
            return work()

        return await respond_to_admin(context, self._keys, admitted)

    async def _create(self, request: pb.CreateTenantRequest) -> pb.Tenant:
        return _tenant(await self._admin.create(request.name, _fields(request.fields)))

    async def _get(self, request: pb.GetTenantRequest) -> pb.Tenant:
        return _tenant(self._accounts.tenant(request.name))

    async def _list(self) -> pb.ListTenantsResponse:
        return pb.ListTenantsResponse(tenants=map(_tenant, self._accounts.tenants()))

    async def _update(self, request: pb.UpdateTenantRequest) -> pb.Tenant:
        return _tenant(await self._admin.change(request.name, _fields(request.fields)))

    async def _disable(self, request: pb.DisableTenantRequest) -> pb.Tenant:
        return _tenant(await self._accounts.disable(request.name, not request.enable))

    async def _delete(self, request: pb.DeleteTenantRequest) -> pb.DeleteTenantResponse:
        return pb.DeleteTenantResponse(keys=await self._admin.delete(request.name))

    async def _create_key(self, request: pb.CreateKeyRequest) -> pb.NewKey:
        return _new_key(await self._accounts.create_key(request.tenant, request.label))

    async def _list_keys(self, request: pb.ListKeysRequest) -> pb.ListKeysResponse:
        return pb.ListKeysResponse(keys=map(_key, self._accounts.keys(request.tenant)))

    async def _rotate(self, request: pb.RotateKeyRequest) -> pb.NewKey:
        return _new_key(await self._accounts.rotate(request.id, keep=request.keep))

    async def _disable_key(self, request: pb.DisableKeyRequest) -> pb.Key:
        return _key(await self._accounts.disable_key(request.id, not request.enable))

    async def _delete_key(self, request: pb.DeleteKeyRequest) -> pb.DeleteKeyResponse:
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
    return pb.Tenant(**tenant_json(account))


def _key(account: AccountRecord) -> pb.Key:
    return pb.Key(**key_json(account))


def _new_key(new: IssuedKey) -> pb.NewKey:
    return pb.NewKey(key=_key(new.account), secret=new.secret)
