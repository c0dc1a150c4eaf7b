"""Every administrative operation under every role, over HTTP and gRPC."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import grpc
import pytest
from admin_room import AdminRoom, admin_room
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from gateway.api_schema.operation import PLACEHOLDER, Operation, admin
from gateway.core.administrators import AdminRole
from gateway.http.openapi.operations import OPERATIONS
from gateway.pb import adapters_pb2, admins_pb2, limits_pb2, operations_pb2, tenants_pb2, usage_pb2
from gateway.rpc.administration import ROWS
from gateway.rpc.api import GrpcServer

ROOMS = (adapters_pb2, admins_pb2, limits_pb2, operations_pb2, tenants_pb2, usage_pb2)
ADMINISTRATIVE = [operation for operation in OPERATIONS if operation.who == "admin"]
ALLOWED = {
    AdminRole.VIEWER: set(AdminRole),
    AdminRole.OPERATOR: {AdminRole.OPERATOR, AdminRole.OWNER},
    AdminRole.ACCOUNTS: {AdminRole.ACCOUNTS, AdminRole.OWNER},
    AdminRole.OWNER: {AdminRole.OWNER},
}
"""Roles that may call an operation, by the role that it needs."""
EXPECTED = {
    "admins": AdminRole.OWNER,
    "tenants": AdminRole.ACCOUNTS,
    "keys": AdminRole.ACCOUNTS,
    "limits": AdminRole.ACCOUNTS,
    "adapters": AdminRole.OPERATOR,
    "engines": AdminRole.OPERATOR,
    "gateways": AdminRole.OPERATOR,
    "lanes": AdminRole.OPERATOR,
    "requests": AdminRole.OPERATOR,
    "batches": AdminRole.OPERATOR,
}
"""Roles that changes need, by what they change."""


@pytest.fixture
async def room(tmp_path) -> AsyncIterator[AdminRoom]:
    async with admin_room(tmp_path) as found:
        yield found


def test_changes_need_the_role_of_what_they_change_and_all_read():
    assert len(ADMINISTRATIVE) > 40
    for operation in ADMINISTRATIVE:
        if operation.is_change:
            assert operation.role is EXPECTED[operation.noun], operation.action
        elif operation.path != "/admin/v1/check":  # it stalls the engines
            assert operation.role is AdminRole.VIEWER, operation.path


def test_a_change_that_names_no_role_does_not_come_to_be():
    with pytest.raises(ValueError, match="must name the role"):
        admin("POST", "/admin/v1/things", "Change things.", "text/plain", frozenset())


async def ask(room: AdminRoom, operation: Operation, key: str | None):
    """Call an operation with a body and a query that no handler accepts, so that nothing is changed."""
    path = PLACEHOLDER.sub("absent", operation.path)
    async with room.app.client(key) as client:
        return await client.request(operation.method, path, params={"unknown": "1"})


@pytest.mark.parametrize("operation", ADMINISTRATIVE, ids=lambda row: f"{row.method} {row.path}")
async def test_each_role_over_http(room, operation):
    for role in AdminRole:
        response = await ask(room, operation, room.secrets[role])
        if role in ALLOWED[operation.role]:
            assert response.status_code not in (401, 403), role
            continue
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (403, "permission_denied", "permission_error")
        assert operation.role in error["message"] and role in error["message"]
    assert (await ask(room, operation, "sk-unknown-to-all")).status_code == 401
    tenants = (await room.accounts.create_key("acme")).secret
    assert (await ask(room, operation, tenants)).json()["error"]["code"] == "forbidden"
    assert [entry for entry in await room.entries() if entry.by in list(AdminRole)] == []


async def test_each_role_over_grpc(room):
    methods = {
        f"{service.name}/{method.name}": (service, method)
        for pb in ROOMS
        for service in pb.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods.keys() == ROWS.keys()
    async with (
        GrpcServer(room.app.services, grace_seconds=0.0) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        for name, (service, method) in methods.items():
            rows = ROWS[name]
            assert {row.role for row in rows.rows.values()} == {rows.role}, name
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = kind(f"/{service.full_name}/{method.name}", lambda message: message, lambda answer: answer)
            for role in AdminRole:
                if role not in ALLOWED[rows.role]:
                    error = await denied(call, room.secrets[role], method.server_streaming)
                    assert rows.role in error.message and error.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
                    info = error_details_pb2.ErrorInfo()
                    assert error.details[0].Unpack(info) and info.reason == "PERMISSION_DENIED"
                elif not method.server_streaming:  # a field that no message has is refused after the key is accepted
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call(b"\xd2\x7d\x01x", metadata=bearer(room.secrets[role]))
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, role)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def denied(call, key: str, streams: bool):
    running = call(b"", metadata=bearer(key))
    answer = running.read() if streams else running
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    status = rpc_status.from_call(caught.value)
    assert status is not None
    return status


async def test_names_of_actions_are_words_and_differ():
    actions = [operation.action for operation in ADMINISTRATIVE if operation.is_change]
    assert len(actions) == len({*actions})
    assert all(re.fullmatch(r"[a-z]+\.[a-z_]+", action) for action in actions)
    assert {"tenants.create", "tenants.disable", "keys.rotate", "admins.delete", "limits.change"} <= {*actions}
