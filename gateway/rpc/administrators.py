"""The service loralane.v1.AdministratorAdmin, for administrators' keys."""

from __future__ import annotations

import msgspec

from gateway.accounts.admin import shown_admin
from gateway.accounts.administrators import Administrators
from gateway.accounts.record import AccountRecord
from gateway.accounts.secrets import IssuedKey
from gateway.pb import admins_pb2 as pb
from gateway.pb import admins_pb2_grpc as pb_grpc
from gateway.rpc.calls import RpcCall


class AdministratorAdminService(pb_grpc.AdministratorAdminServicer):
    def __init__(self, admins: Administrators) -> None:
        self._admins = admins

    async def CreateAdministrator(  # noqa: N802
        self, request: pb.CreateAdministratorRequest, call: RpcCall
    ) -> pb.NewAdministrator:
        return _new(await self._admins.create(request.name, request.role, request.tenant))

    async def GetAdministrator(  # noqa: N802
        self, request: pb.GetAdministratorRequest, call: RpcCall
    ) -> pb.Administrator:
        return _administrator(self._admins.get(request.name))

    async def ListAdministrators(  # noqa: N802
        self, request: pb.ListAdministratorsRequest, call: RpcCall
    ) -> pb.ListAdministratorsResponse:
        return pb.ListAdministratorsResponse(administrators=map(_administrator, self._admins.records.values()))

    async def UpdateAdministrator(  # noqa: N802
        self, request: pb.UpdateAdministratorRequest, call: RpcCall
    ) -> pb.Administrator:
        return _administrator(await self._admins.change(request.name, request.role, call.administrator.name))

    async def RotateAdministrator(  # noqa: N802
        self, request: pb.RotateAdministratorRequest, call: RpcCall
    ) -> pb.NewAdministrator:
        return _new(await self._admins.rotate(request.name))

    async def DeleteAdministrator(  # noqa: N802
        self, request: pb.DeleteAdministratorRequest, call: RpcCall
    ) -> pb.DeleteAdministratorResponse:
        await self._admins.delete(request.name, call.administrator.name)
        return pb.DeleteAdministratorResponse()


def _administrator(account: AccountRecord) -> pb.Administrator:
    return pb.Administrator(**msgspec.to_builtins(shown_admin(account)))


def _new(new: IssuedKey) -> pb.NewAdministrator:
    return pb.NewAdministrator(administrator=_administrator(new.account), secret=new.secret)
