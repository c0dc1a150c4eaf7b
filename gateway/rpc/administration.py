"""The rows of the API that the methods of administrators stand for, and the way of their calls."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

from google.protobuf.message import Message

from gateway.administration.trail import AdminCall, AdminTrail
from gateway.api_schema import accounts, adapters, admins, engines, limits, traffic, usage
from gateway.api_schema.operation import Operation
from gateway.core.administrators import AdminRole
from gateway.rpc.calls import RpcCall


class Rows(NamedTuple):
    """The rows that one method stands for. If there are several, the value of a request's `field` chooses one; all need
    the same role. A value without a row is refused by the method itself."""

    rows: Mapping[Any, Operation]
    field: str = ""

    @property
    def role(self) -> AdminRole:
        return next(iter(self.rows.values())).role

    def of(self, request: Any) -> Operation:
        value = getattr(request, self.field) if self.field else None
        return self.rows.get(value) or next(iter(self.rows.values()))


def _one(row: Operation) -> Rows:
    return Rows({None: row})


def _if(field: str, row: Operation, otherwise: Operation) -> Rows:
    return Rows({True: row, False: otherwise}, field)


LANE_ACTIONS = Rows({"pause": traffic.PAUSE_LANE, "drain": traffic.DRAIN_LANE, "resume": traffic.RESUME_LANE}, "action")
ENGINE_ACTIONS = Rows({"drain": engines.DRAIN, "resume": engines.RESUME, "restart": engines.RESTART}, "action")

ROWS: Mapping[str, Rows] = {
    "AdministratorAdmin/CreateAdministrator": _one(admins.CREATE_ADMIN),
    "AdministratorAdmin/GetAdministrator": _one(admins.GET_ADMIN),
    "AdministratorAdmin/ListAdministrators": _one(admins.LIST_ADMINS),
    "AdministratorAdmin/UpdateAdministrator": _one(admins.CHANGE_ADMIN),
    "AdministratorAdmin/RotateAdministrator": _one(admins.ROTATE_ADMIN),
    "AdministratorAdmin/DeleteAdministrator": _one(admins.DELETE_ADMIN),
    "TenantAdmin/CreateTenant": _one(accounts.CREATE_TENANT),
    "TenantAdmin/GetTenant": _one(accounts.GET_TENANT),
    "TenantAdmin/ListTenants": _one(accounts.LIST_TENANTS),
    "TenantAdmin/UpdateTenant": _one(accounts.CHANGE_TENANT),
    "TenantAdmin/DisableTenant": _if("enable", accounts.ENABLE_TENANT, accounts.DISABLE_TENANT),
    "TenantAdmin/DeleteTenant": _one(accounts.DELETE_TENANT),
    "TenantAdmin/CreateKey": _one(accounts.CREATE_KEY),
    "TenantAdmin/GetKey": _one(accounts.GET_KEY),
    "TenantAdmin/UpdateKey": _one(accounts.CHANGE_KEY),
    "TenantAdmin/ListKeys": _one(accounts.LIST_KEYS),
    "TenantAdmin/RotateKey": _one(accounts.ROTATE_KEY),
    "TenantAdmin/DisableKey": _if("enable", accounts.ENABLE_KEY, accounts.DISABLE_KEY),
    "TenantAdmin/DeleteKey": _one(accounts.DELETE_KEY),
    "LimitAdmin/Get": _one(limits.LIST),
    "LimitAdmin/Set": _one(limits.SET),
    "LimitAdmin/Reset": _one(limits.RESET),
    "LimitAdmin/Usage": _one(limits.USAGE),
    "LimitAdmin/Watch": _one(limits.USAGE),
    "UsageAdmin/Report": _one(usage.REPORT),
    "AdapterAdmin/Load": _one(adapters.LOAD),
    "AdapterAdmin/Reload": _one(adapters.RELOAD),
    "AdapterAdmin/Unload": _one(adapters.UNLOAD),
    "AdapterAdmin/Pin": _if("pinned", adapters.PIN, adapters.UNPIN),
    "AdapterAdmin/Alias": _one(adapters.ALIAS),
    "AdapterAdmin/Allow": _one(adapters.ALLOW),
    "AdapterAdmin/List": _one(adapters.LIST),
    "AdapterAdmin/Watch": _one(adapters.LIST),
    "LaneAdmin/List": _one(traffic.LIST_LANES),
    "LaneAdmin/Set": LANE_ACTIONS,
    "EngineAdmin/List": _one(engines.LIST),
    "EngineAdmin/Set": ENGINE_ACTIONS,
    "EngineAdmin/Add": _one(engines.ADD),
    "EngineAdmin/Remove": _one(engines.REMOVE),
    "RequestAdmin/List": _one(traffic.LIST_REQUESTS),
    "RequestAdmin/Cancel": _one(traffic.CANCEL_REQUEST),
}
"""Rows of the HTTP API by the methods of loralane.v1 that do the same. The rows name the roles that callers need."""


def rows_of(method: str) -> Rows:
    """Return the rows of a method of administrators, named as /package.Service/Method. Raises KeyError if the table
    lacks it."""
    return ROWS[method.removeprefix("/").rsplit(".", 1)[-1]]


async def administered(
    trail: AdminTrail, rows: Rows, behaviour: Callable[[Any, Any], Any], request: Any, call: RpcCall
) -> Any:
    """Carry out a call of an administrator with a method's handler, and return its response."""
    row, who = rows.of(request), call.administrator
    described = AdminCall(who, row, _names(request), "grpc", peer_address(call.context.peer()), call.request_id)
    return await trail.run(described, partial(behaviour, request, call), _made_id)


def _names(request: Message) -> dict[str, str]:
    """Return the texts of a request by the names of their fields, with those of the scope of limits in it."""
    names: dict[str, str] = {}
    for field, value in request.ListFields():
        if isinstance(value, str):
            names[field.name] = value
        elif field.name == "scope":
            names |= _names(value)
    return names


def _made_id(response: Any) -> str:
    """Return the id of a new API key."""
    key = getattr(response, "key", None)
    return str(getattr(key, "id", "")) or str(getattr(response, "id", ""))


def peer_address(peer: str) -> str:
    """Return the address in gRPC's name of a peer, such as ipv4:127.0.0.1:50000 or ipv6:%5B::1%5D:50000."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rsplit(":", 1)[0].strip("[]") if kind in ("ipv4", "ipv6") else rest
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return kind
