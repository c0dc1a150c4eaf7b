"""A gRPC server in front of a gateway with fakes, and the calls that tests make to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import pytest
from fakes import BASE, KEYS, FakeEngine, GatewayApp, build_gateway_app, key_ring
from google.rpc import error_details_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_status import rpc_status

from engine.core.messages.requests import Lane
from gateway.accounts.registry import AccountRegistry
from gateway.core.tenants import Tenant
from gateway.pb import generation_pb2 as pb
from gateway.pb.adapters_pb2_grpc import AdapterAdminStub
from gateway.pb.generation_pb2_grpc import GenerationStub
from gateway.requests.route_runner import RouteTable
from gateway.rpc.api import GrpcServer

NIGHT = Tenant("night", default_lane=Lane.BATCH, highest_lane=Lane.BATCH, adapters=())
MAX_MESSAGE_BYTES = 100_000


@dataclass
class GrpcApp:
    gateway_app: GatewayApp
    port: int
    generation: GenerationStub
    admin: AdapterAdminStub
    health: HealthStub
    channel: grpc.aio.Channel

    async def assert_empty(self) -> None:
        await until(lambda: self.gateway_app.gateway.active == 0)
        await self.gateway_app.assert_empty()


@dataclass
class Refusal:
    """What a failed call says."""

    error: grpc.aio.AioRpcError
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    """The google.rpc details of the status, by message name."""

    @property
    def code(self) -> str:
        return self.error.code().name

    @property
    def reason(self) -> str:
        return self.details["ErrorInfo"].reason

    @property
    def fields(self) -> list[str]:
        return [violation.field for violation in self.details["BadRequest"].field_violations]


def keys() -> AccountRegistry:
    return key_ring(KEYS | {"sk-night": NIGHT})


@asynccontextmanager
async def open_grpc_app(
    root: Path,
    *,
    grace_seconds: float = 0.0,
    others: Mapping[str, FakeEngine] = MappingProxyType({}),
    routes: RouteTable | None = None,
    **options: Any,
) -> AsyncIterator[GrpcApp]:
    """Start a gRPC server, which gets `grace_seconds`, and connect a client to it. The gateway also serves the base
    models `others`, and virtual models; `options` go to `build_gateway_app`."""
    gateway_app = await build_gateway_app(root, others=others, routes=routes, accounts=keys(), **options)
    await gateway_app.limiter.configure([*gateway_app.limiter._tenants.values(), NIGHT])
    server = GrpcServer(gateway_app.services, max_message_bytes=MAX_MESSAGE_BYTES, grace_seconds=grace_seconds)
    async with server as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield GrpcApp(
            gateway_app, port, GenerationStub(channel), AdapterAdminStub(channel), HealthStub(channel), channel
        )


def as_key(name: str = "acme", **more: str) -> tuple[tuple[str, str], ...]:
    """Metadata; x_request_id becomes x-request-id."""
    return (("authorization", f"Bearer sk-{name}"), *((key.replace("_", "-"), value) for key, value in more.items()))


def ask(model: str = BASE, /, sampling: dict[str, Any] | None = None, **fields: Any) -> pb.GenerateRequest:
    """Build a request for five tokens after a prompt of five tokens. `fields` and `sampling` change it."""
    params = pb.SamplingParams(**({"max_tokens": 5} if sampling is None else sampling))
    has_input = not fields.keys().isdisjoint({"chat", "prompt", "prompt_ids"})
    return pb.GenerateRequest(model=model, sampling=params, **({} if has_input else {"prompt": "hello"}), **fields)


async def refused(call: Awaitable[object]) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = rpc_status.from_call(caught.value)
    refusal = Refusal(caught.value, caught.value.details() if status is None else status.message)
    for packed in status.details if status else ():
        name = packed.TypeName().rpartition(".")[2]
        refusal.details[name] = getattr(error_details_pb2, name).FromString(packed.value)
    return refusal


async def until(condition: Callable[[], bool]) -> None:
    """Bounded, so that a test fails instead of hanging."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to pass")
