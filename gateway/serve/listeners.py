"""HTTP and gRPC listeners of one gateway process, on ports of its own or shared with other processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from gateway.config.certificates import Certificate
from gateway.http.connections import BoundedProtocol
from gateway.http.server import KEEP_ALIVE_SECONDS, guarded_config
from gateway.requests.wire_room import WireRoom
from gateway.rpc.api import GrpcServer
from gateway.serve.addresses import bind_socket
from gateway.serve.launch import StartError

log = structlog.get_logger("http")

BACKLOG = 2048
GRACE_SECONDS = 10.0
"""Seconds that running requests of a lone HTTP port have at its end."""
CUT_SECONDS = 0.1
"""Seconds that requests whose connections were cut may take to end by themselves before they are cancelled."""


class HttpServer:
    """One HTTP port: runs uvicorn, from `start` to `stop`, on a socket that this class binds itself, so that a port in
    use raises StartError and the number for port 0 is known at once.

    Args:
        certificate: None means plain HTTP.
        shared: other processes listen on the port, too; the kernel distributes connections (SO_REUSEPORT).
        room: bounds what strangers hold at all ports of the process. None means that this port has its own.
        keep_alive_s: seconds after which an idle connection is closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        certificate: Certificate | None = None,
        shared: bool = False,
        room: WireRoom | None = None,
        keep_alive_s: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        contexts = None if certificate is None else lambda *_: certificate.for_http()
        bounds: dict[str, Any] = {"room": room, "keep_alive_s": keep_alive_s}
        config = guarded_config(app, BoundedProtocol, **bounds, lifespan="off", ssl_context_factory=contexts)
        self._server = _Server(config)
        self._address, self._shared = (host, port), shared
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Start to listen, in a task; returns the port number. Raises StartError if the port is not available."""
        listener = bind_socket(*self._address, shared=self._shared)
        listener.listen(BACKLOG)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        return listener.getsockname()[1]

    def stop_listening(self) -> None:
        """Accept no more connections. Those that are open go on."""
        for server in self._server.servers:
            server.close()

    async def stop(self, seconds: float) -> None:
        """Accept no more connections, wait up to `seconds` for running requests, cut the connections of those that
        still run, and return when the server has ended."""
        assert self._task is not None
        self._server.should_exit = True
        done, _ = await asyncio.wait((self._task,), timeout=seconds)
        if not done:
            await self._server.cut_off()
        await self._task


@asynccontextmanager
async def http_port(
    app: ASGIApp, host: str, port: int, *, certificate: Certificate | None = None
) -> AsyncIterator[int]:
    """Serve `app` over HTTP until the block ends; yields the port number. Running requests then have GRACE_SECONDS to
    finish. Raises StartError if the port is not available."""
    server = HttpServer(app, host, port, certificate=certificate)
    number = await server.start()
    try:
        yield number
    finally:
        await server.stop(GRACE_SECONDS)


async def grpc_port(server: GrpcServer) -> int:
    """Start a gRPC server; returns its port number. Raises StartError if the port is not available."""
    try:
        return await server.start()
    except OSError as error:
        raise StartError(str(error)) from error


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers: uvicorn's would end the process before the engine is stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def cut_off(self) -> None:
        """End the requests that still run: abort their connections and, CUT_SECONDS later, cancel their tasks. Logs a
        warning."""
        connections, tasks = list(self.server_state.connections), self.server_state.tasks
        log.warning("requests_cut_off", connections=len(connections))
        for connection in connections:
            connection.transport.abort()  # its request gets a disconnect and ends in order
        if tasks:
            await asyncio.wait(tasks, timeout=CUT_SECONDS)
        logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
        for task in tasks:
            task.cancel()


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Return False for tracebacks that uvicorn logs when a request is cancelled, so that a filter drops them."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
