"""Connects the gateway's services to its HTTP and gRPC ports, and opens and closes these ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp

from gateway.config.whole import Config
from gateway.http.app import create_app
from gateway.http.settings import GrpcAddress, PortSettings
from gateway.requests.service import Gateway
from gateway.responses.service import Responses
from gateway.rpc.api import GrpcServer
from gateway.serve.addresses import Endpoint, Ports, endpoints
from gateway.serve.listeners import HttpServer, grpc_port
from gateway.serve.stopping import Stop
from gateway.services import Services

LATE_SECONDS = 0.3
"""Extra time, after the grace period, in which the error that ends a running request is sent."""


@dataclass(frozen=True, slots=True)
class EndpointServers:
    """The HTTP app and the gRPC server of one endpoint, which do not listen on its ports yet."""

    endpoint: Endpoint
    app: ASGIApp
    grpc: GrpcServer
    gateway: Gateway
    responses: Responses
    keep_alive_s: float
    """Seconds after which the HTTP port closes an idle connection."""


def endpoint_servers(services: Services, config: Config, *, shared: bool) -> tuple[EndpointServers, ...]:
    """Create the servers of each configured endpoint, which do not listen yet. `shared` means that other processes use
    the same ports. Raises ConfigError for an unusable certificate."""
    return tuple(_endpoint_servers(endpoint, services, config, shared) for endpoint in endpoints(config))


def _endpoint_servers(endpoint: Endpoint, services: Services, config: Config, shared: bool) -> EndpointServers:
    grpc = GrpcServer(
        services,
        host=endpoint.grpc.host,
        port=endpoint.grpc.port,
        certificate=endpoint.grpc.certificate(),
        shared=shared,
        surface=endpoint.surface,
    )
    settings = PortSettings(
        surface=endpoint.surface,
        max_body_bytes=config.http.max_body_bytes,
        metrics_keys=config.admin.metrics_keys,
        open_metrics=config.admin.open_metrics,
        cors_origins=config.http.cors_origins,
        grpc=lambda: None if grpc.port is None else GrpcAddress(grpc.port, grpc.uses_tls),
    )
    app = create_app(services, settings)
    return EndpointServers(endpoint, app, grpc, services.gateway, services.responses, config.http.keep_alive_s)


@asynccontextmanager
async def listening(
    servers: Sequence[EndpointServers], stop: Stop, *, shared: bool
) -> AsyncIterator[tuple[Ports, ...]]:
    """Listen on the ports of all endpoints until the block ends; yields the port numbers, in the order of `servers`.

    When the block ends, the ports accept no new connections; running requests may finish during the grace period of
    `stop`, and those that still run after it end with an error that says so. Admin ports close last, so that operators
    can watch. Raises StartError if a port is not available, and ConfigError if a certificate cannot be used.
    """
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_drain_background, servers[0].responses, stop)
        found = [await stack.enter_async_context(_listening_on(each, stop, shared)) for each in reversed(servers)]
        stack.enter_context(_ending_requests(servers[0].gateway, stop))
        yield tuple(reversed(found))


@asynccontextmanager
async def _listening_on(servers: EndpointServers, stop: Stop, shared: bool) -> AsyncIterator[Ports]:
    """Listen on the HTTP and the gRPC port of an endpoint until the block ends, then close both at the same time;
    yields their numbers."""
    http = servers.endpoint.http
    server = HttpServer(
        servers.app,
        http.host,
        http.port,
        certificate=http.certificate(),
        shared=shared,
        room=servers.gateway.wire,
        keep_alive_s=servers.keep_alive_s,
    )
    async with AsyncExitStack() as stack:
        port = await server.start()
        stack.push_async_callback(_stop_both, server, servers.grpc, stop)
        yield Ports(port, await grpc_port(servers.grpc))


async def _stop_both(http: HttpServer, grpc: GrpcServer, stop: Stop) -> None:
    seconds = stop.grace + LATE_SECONDS
    await asyncio.gather(http.stop(seconds), grpc.stop(seconds))


async def _drain_background(responses: Responses, stop: Stop) -> None:
    """Wait until all background responses have ended. Those that still run LATE_SECONDS after the grace period of
    `stop` are cancelled."""
    await responses.background.drain(stop.grace + LATE_SECONDS)


@contextmanager
def _ending_requests(gateway: Gateway, stop: Stop) -> Iterator[None]:
    """When the block ends, schedule a timer that ends all running requests of `gateway` with an error after the grace
    period of `stop`."""
    try:
        yield
    finally:
        asyncio.get_running_loop().call_later(stop.grace, gateway.end_requests)
