"""Watch streams of administrators, which end when the administrator must not call any longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from admin_room import OWNER_KEY, AdminRoom, admin_room
from fakes import ACME
from grpc_app import refused

from gateway.core.administrators import Administrator, AdminRole
from gateway.core.tenants import hash_key
from gateway.pb import adapters_pb2, limits_pb2
from gateway.pb.adapters_pb2_grpc import AdapterAdminStub
from gateway.pb.limits_pb2_grpc import LimitAdminStub
from gateway.rpc.api import GrpcServer

SOON = 0.1
"""Interval of the streams in seconds, the shortest."""


@pytest.fixture
async def room(tmp_path) -> AsyncIterator[AdminRoom]:
    async with admin_room(tmp_path) as found:
        yield found


@pytest.fixture
async def watch(room):
    """Opens a Watch stream with an administrator's key, and returns it when it has sent its first message."""
    async with (
        GrpcServer(room.app.services, grace_seconds=0.0) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        limits, adapters = LimitAdminStub(channel), AdapterAdminStub(channel)

        async def opened(noun: str, key: str, tenant: str = "") -> grpc.aio.UnaryStreamCall:
            metadata = (("authorization", f"Bearer {key}"),)
            if noun == "adapters":
                request = adapters_pb2.WatchAdaptersRequest(interval_seconds=SOON)
                stream = adapters.Watch(request, metadata=metadata)
            else:
                request = limits_pb2.WatchLimitsRequest(tenant=tenant, interval_seconds=SOON)
                stream = limits.Watch(request, metadata=metadata)
            assert await stream.read() is not grpc.aio.EOF
            return stream

        yield opened


async def end_of(stream: grpc.aio.UnaryStreamCall) -> str:
    """Wait until a stream ends, and return its status."""

    async def to_its_end() -> None:
        while await stream.read() is not grpc.aio.EOF:
            pass

    async with asyncio.timeout(30):
        return (await refused(to_its_end())).code


@pytest.mark.parametrize("noun", ["limits", "adapters"])
async def test_a_removed_administrators_stream_ends(room, watch, noun):
    other = await watch(noun, OWNER_KEY)
    removed, rotated = await watch(noun, room.secrets["viewer"]), await watch(noun, room.secrets["operator"])
    await room.accounts.administrators.delete("viewer", "boss")
    await room.accounts.administrators.rotate("operator")
    assert await end_of(removed) == await end_of(rotated) == "UNAUTHENTICATED"
    assert not other.done()


async def test_a_stream_of_a_disabled_tenants_administrator_ends(room, watch):
    stream = await watch("limits", await room.admin("acme-eyes", AdminRole.VIEWER, "acme"), "acme")
    await room.accounts.disable(ACME.name, True)
    assert await end_of(stream) == "UNAUTHENTICATED"


async def test_a_stream_of_an_administrator_of_another_tenant_now_ends(room, watch):
    stream = await watch("limits", OWNER_KEY)
    await room.accounts.administrators.seed([(Administrator("boss", AdminRole.OWNER, "acme"), hash_key(OWNER_KEY))])
    assert await end_of(stream) == "PERMISSION_DENIED"
