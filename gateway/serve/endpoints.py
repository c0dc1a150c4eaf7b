"""Connects the gateway's services to its HTTP and gRPC ports, and opens and closes these ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp

from gateway.config.whole import Config
from gateway.http.app import create_app
from gateway.http.settings import GrpcAddress, PortSettings
from gateway.registry.gateways import GatewayDirectory
from gateway.requests.service import Gateway
from gateway.responses.service import Responses
from gateway.rpc.api import GrpcServer
from gateway.serve.addresses import Endpoint, Ports, endpoints
from gateway.serve.departure import Departure, OpenEndpoint, departing
from gateway.serve.listeners import HttpServer, grpc_port
from gateway.serve.stopping import Stop
from gateway.services import Services

LATE_SECONDS = 0.3
"""Seconds after the drain in which the error that ends a running request is sent."""


@dataclass(frozen=True, slots=True)
class EndpointServers:
    """The HTTP app and the gRPC server of one endpoint, which do not listen on its ports yet."""

    endpoint: Endpoint
    app: ASGIApp
    grpc: GrpcServer
    gateway: Gateway
    directory: GatewayDirectory
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
    keep_alive_s = config.http.keep_alive_s
    return EndpointServers(endpoint, app, grpc, services.gateway, services.gateways, services.responses, keep_alive_s)


@asynccontextmanager
async def listening(
    servers: Sequence[EndpointServers], stop: Stop, *, shared: bool
) -> AsyncIterator[tuple[Ports, ...]]:
    """Listen on the ports of all endpoints until the block ends; yields the port numbers, in the order of `servers`.

    When the block ends, the gateway drains (see `Departure`), and those requests that still run after the grace period
    of `stop` end with an error that says so. Then the ports are closed, admin ports last, so that operators can watch.
    Raises StartError if a port is not available, and ConfigError if a certificate cannot be used.
    """
    gateway, responses = servers[0].gateway, servers[0].responses
    async with AsyncExitStack() as stack:
        stack.push_async_callback(responses.background.drain, LATE_SECONDS)
        found = [await stack.enter_async_context(_listening_on(each, shared)) for each in reversed(servers)]
        opened = [endpoint for endpoint, _ in found]
        has_peer = servers[0].directory.has_peer if shared else None
        await stack.enter_async_context(departing(Departure(opened, gateway, responses, stop, has_peer)))
        ports = tuple(each for _, each in reversed(found))
        servers[0].directory.address = servers[0].endpoint.http.url(ports[0].http)
        yield ports


@asynccontextmanager
async def _listening_on(servers: EndpointServers, shared: bool) -> AsyncIterator[tuple[OpenEndpoint, Ports]]:
    """Listen on the HTTP and the gRPC port of an endpoint until the block ends, then close both at the same time;
    yields the servers, and their numbers."""
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
        stack.push_async_callback(_stop_both, server, servers.grpc)
        ports = Ports(port, await grpc_port(servers.grpc))
        yield OpenEndpoint(servers.endpoint.surface, server, servers.grpc), ports


async def _stop_both(http: HttpServer, grpc: GrpcServer) -> None:
    await asyncio.gather(http.stop(LATE_SECONDS), grpc.stop(LATE_SECONDS))
