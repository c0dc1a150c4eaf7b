"""What a gateway's ports give access to, and how they are opened and closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp

from gateway.accounts.registry import AccountRegistry
from gateway.batches.service import Batches
from gateway.config.whole import Config
from gateway.files.service import Files
from gateway.http.api import create_app
from gateway.observe.metrics import Metrics
from gateway.operations import Operations
from gateway.rpc.api import GrpcServer
from gateway.serve.addresses import Front, Ports, fronts
from gateway.serve.listeners import grpc_port, http_port
from gateway.service import Gateway
from gateway.usage.admin import UsageAdmin


@dataclass(frozen=True, slots=True)
class Offer:
    """What callers and administrators are given access to."""

    gateway: Gateway
    accounts: AccountRegistry
    metrics: Metrics
    operations: Operations
    usage: UsageAdmin
    files: Files
    batches: Batches


@dataclass(frozen=True, slots=True)
class Door:
    """A front that could be opened."""

    front: Front
    app: ASGIApp
    grpc: GrpcServer


def doors(offer: Offer, config: Config, *, shared: bool) -> tuple[Door, ...]:
    """One for each front. `shared`: other processes listen at its ports too. Raises ConfigError."""
    return tuple(_door(front, offer, config, shared) for front in fronts(config))


def _door(front: Front, offer: Offer, config: Config, shared: bool) -> Door:
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
    )
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
    return Door(front, app, grpc)


@asynccontextmanager
async def opened(doors: Sequence[Door], *, shared: bool) -> AsyncIterator[tuple[Ports, ...]]:
    """Yields their ports. The first is the first to close: administrators may watch until the end.

    Raises:
        StartError: a port cannot be had.
        ConfigError: a certificate cannot be used.
    """
    async with AsyncExitStack() as stack:
        found = [await _enter(stack, door, shared) for door in reversed(doors)]
        yield tuple(reversed(found))


async def _enter(stack: AsyncExitStack, door: Door, shared: bool) -> Ports:
    http = door.front.http
    listening = http_port(door.app, http.host, http.port, certificate=http.certificate(), shared=shared)
    number = await stack.enter_async_context(listening)
    return Ports(number, await stack.enter_async_context(grpc_port(door.grpc)))
