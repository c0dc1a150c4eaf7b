"""Connects the gateway's services to its HTTP and gRPC ports, and opens and closes these ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp

from gateway.accounts.registry import AccountRegistry
from gateway.batches.service import Batches
from gateway.config.whole import Config
from gateway.files.service import Files
from gateway.http.api import create_app
from gateway.http.root import GrpcAddress
from gateway.observe.metrics import Metrics
from gateway.observe.operations import Operations
from gateway.requests.service import Gateway
from gateway.rpc.api import GrpcServer
from gateway.serve.addresses import Front, Ports, fronts
from gateway.serve.listeners import HttpServer, grpc_port
from gateway.serve.stopping import Stop
from gateway.usage.report import UsageAdmin

LATE_SECONDS = 0.3
"""Extra time, after the grace period, in which the error that ends a running request is sent."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The services that the HTTP and gRPC APIs expose to tenants and operators."""

    gateway: Gateway
    accounts: AccountRegistry
    metrics: Metrics
    operations: Operations
    usage: UsageAdmin
    files: Files
    batches: Batches


@dataclass(frozen=True, slots=True)
class Door:
    """A front with the HTTP app and the gRPC server that are ready to listen on its ports."""

    front: Front
    app: ASGIApp
    grpc: GrpcServer
    gateway: Gateway


def doors(offer: Offer, config: Config, *, shared: bool) -> tuple[Door, ...]:
    """Return a door for each front. `shared` means that other processes use the same ports. Raises ConfigError."""
    return tuple(_door(front, offer, config, shared) for front in fronts(config))


def _door(front: Front, offer: Offer, config: Config, shared: bool) -> Door:
    grpc = GrpcServer(
        offer.gateway,
        offer.accounts,
        offer.accounts,
        offer.operations,
        host=front.grpc.host,
        port=front.grpc.port,
        certificate=front.grpc.certificate(),
        shared=shared,
        usage=offer.usage,
        files=offer.files,
        batches=offer.batches,
        part=front.part,
    )
    app = create_app(
        offer.gateway,
        offer.accounts,
        metrics=offer.metrics,
        accounts=offer.accounts,
        operations=offer.operations,
        max_body_bytes=config.http.max_body_bytes,
        metrics_keys=config.admin.metrics_keys,
        open_metrics=config.admin.open_metrics,
        usage=offer.usage,
        files=offer.files,
        batches=offer.batches,
        part=front.part,
        cors_origins=config.http.cors_origins,
        grpc=lambda: None if grpc.port is None else GrpcAddress(grpc.port, grpc.uses_tls),
    )
    return Door(front, app, grpc, offer.gateway)


@asynccontextmanager
async def opened(doors: Sequence[Door], stop: Stop, *, shared: bool) -> AsyncIterator[tuple[Ports, ...]]:
    """Listen on the ports of all doors until the block ends; yields the ports. Admin ports close last, so that
    operators can watch until the end.

    At the end of the block no new connections are accepted. Running requests have the grace period of `stop` to finish;
    those that still run after it end with an error that says so.

    Raises:
        StartError: a port is not available.
        ConfigError: a certificate cannot be used.
    """
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(_open(door, stop, shared)) for door in reversed(doors)]
        stack.enter_context(_ending_requests(doors[0].gateway, stop))
        yield tuple(reversed(found))


@asynccontextmanager
async def _open(door: Door, stop: Stop, shared: bool) -> AsyncIterator[Ports]:
    """Open the HTTP and the gRPC port of a front until the block ends, then close both at the same time."""
    http = door.front.http
    server = HttpServer(door.app, http.host, http.port, certificate=http.certificate(), shared=shared)
    async with AsyncExitStack() as stack:
        port = await server.start()
        stack.push_async_callback(_stop_both, server, door.grpc, stop)
        yield Ports(port, await grpc_port(door.grpc))


async def _stop_both(http: HttpServer, grpc: GrpcServer, stop: Stop) -> None:
    seconds = stop.grace + LATE_SECONDS
    await asyncio.gather(http.stop(seconds), grpc.stop(seconds))


@contextmanager
def _ending_requests(gateway: Gateway, stop: Stop) -> Iterator[None]:
    """When the block ends, schedule the end of all running requests for after the grace period."""
    try:
        yield
    finally:
        asyncio.get_running_loop().call_later(stop.grace, gateway.end_requests)
