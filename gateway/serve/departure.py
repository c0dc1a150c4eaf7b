"""The departure of a gateway process: it tells load balancers, then refuses new requests, and waits for running ones.

A gateway that drains keeps its ports open, as Envoy does. Clients and load balancers learn of the drain from `/ready`,
gRPC's health and `Connection: close`, but not at once: new requests are served for LAG_SECONDS more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import structlog

from gateway.core.part import ApiSurface
from gateway.requests.service import Gateway
from gateway.responses.service import Responses
from gateway.rpc.api import GrpcServer
from gateway.serve.listeners import HttpServer
from gateway.serve.stopping import Stop

log = structlog.get_logger("gateway")

LAG_SECONDS = 5.0
"""Seconds for which a gateway that drains still serves new requests, or `http.drain_seconds` if that is less: proxies
and the rules of a cluster follow a change of readiness within seconds."""

LOOK_SECONDS = 1.0
"""Seconds between two looks for other gateways on the same ports."""


@dataclass(frozen=True, slots=True)
class OpenEndpoint:
    """The listening servers of one endpoint."""

    surface: ApiSurface
    http: HttpServer
    grpc: GrpcServer


class Departure:
    """The drain of one gateway process, which an administrator or the end of the process begins, whichever is first."""

    def __init__(
        self,
        opened: Sequence[OpenEndpoint],
        gateway: Gateway,
        responses: Responses,
        stop: Stop,
        has_peer: Callable[[], Awaitable[bool]] | None,
    ) -> None:
        """`has_peer` returns whether another process serves on the same ports; None means that the ports are this
        process's own."""
        self._opened = opened
        self._gateway = gateway
        self._life = gateway.lifecycle
        self._responses = responses
        self._stop = stop
        self._has_peer = has_peer
        self._leaving: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()
        """Set at the end of the drain, when all ports are about to be closed."""
        self._until = 0.0
        """Time on the loop's clock at which the requests that still run are ended."""

    async def follow(self) -> None:
        """Drain once an administrator asks for that, and ask the process to stop if the administrator asks for that,
        too. Runs until it is cancelled, without effect on the drain."""
        await self._life.draining.wait()
        self._begin()
        await self._life.ending.wait()
        self._stop.drain()

    async def finish(self) -> None:
        """Drain, and return when nothing runs any more or the grace period of the stop is over. Requests that run then
        are told to end with an error."""
        self._life.drain()
        leaving = self._begin()
        if self._stop.is_orphan:
            self._until = min(self._until, _now() + self._stop.drain_seconds)
            self._leave_ports(self._opened)
        hurried, left = asyncio.ensure_future(self._stop.hurried.wait()), self._until - _now()
        await asyncio.wait((leaving, hurried), timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
        if self._stop.in_hurry:
            await asyncio.wait((leaving,), timeout=self._stop.grace)
        hurried.cancel()
        if not leaving.done():
            self._gateway.end_requests()
            leaving.cancel()
        await asyncio.wait((leaving,))
        self._is_over.set()

    def _begin(self) -> asyncio.Task[None]:
        if self._leaving is None:
            self._until = _now() + self._stop.drain_seconds
            self._leaving = asyncio.create_task(self._leave(), name="departure")
            if self._has_peer is not None and self._life.is_alone:
                self._yielding = asyncio.create_task(self._leave_to_peers(self._has_peer), name="departure-ports")
        return self._leaving

    async def _leave(self) -> None:
        """Serve new requests for LAG_SECONDS, then refuse them; return when no request runs any more. At the end of the
        grace period, end those that still run."""
        ending = asyncio.get_running_loop().call_at(self._until, self._gateway.end_requests)
        try:
            log.info("gateway_draining", gateway=self._life.id, requests=self._gateway.active)
            await self._lag()
            self._life.refuse()
            await self._wait_for_requests()
            log.info("gateway_drained", gateway=self._life.id)
        finally:
            ending.cancel()

    async def _wait_for_requests(self) -> None:
        seconds = self._stop.drain_seconds  # longer than requests have now: gRPC would cut them off without an error
        calls = [each.grpc.stop(seconds) for each in self._opened if each.surface != "admin" or self._stop.is_orphan]
        await asyncio.gather(*calls, self._life.wait_idle())
        await self._responses.background.wait_idle()

    async def _leave_to_peers(self, has_peer: Callable[[], Awaitable[bool]]) -> None:
        """Leave new HTTP connections to the processes that share the ports, once one of them serves: until then, the
        last process still answers probes and administrators. gRPC's connections go to them after the lag."""
        while not self._is_over.is_set():
            if await has_peer():
                self._leave_ports([each for each in self._opened if each.surface != "admin"])
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._is_over.wait()

    def _leave_ports(self, endpoints: Sequence[OpenEndpoint]) -> None:
        for each in endpoints:
            each.http.stop_listening()

    async def _lag(self) -> None:
        """Wait LAG_SECONDS, unless the stop is a hurried one, or the program that runs the gateway has ended it."""
        if not (self._stop.asked.is_set() or self._life.is_alone):
            return  # neither a signal nor an administrator has: no load balancer sends this gateway anything
        with suppress(TimeoutError):
            async with asyncio.timeout(min(LAG_SECONDS, self._stop.drain_seconds)):
                await self._stop.hurried.wait()


def _now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def departing(departure: Departure) -> AsyncIterator[None]:
    """Follow what administrators ask for until the block ends; then drain."""
    following = asyncio.create_task(departure.follow(), name="departure-follow")
    try:
        yield
    finally:
        following.cancel()
        await departure.finish()
