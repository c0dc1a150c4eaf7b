"""The ports of one gateway process: its own, or shared with others that listen on the same."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from gateway.http.guard import guarded
from gateway.rpc.api import GrpcServer
from gateway.serve.launch import StartError
from gateway.tls import Certificate

BACKLOG = 2048


@asynccontextmanager
async def http_port(
    app: ASGIApp, host: str, port: int, *, certificate: Certificate | None = None, shared: bool = False
) -> AsyncIterator[int]:
    """uvicorn on a socket of ours, so that a port in use is our error and port 0 is known at once. Yields the port.

    `certificate`: None speaks plain HTTP. `shared`: other processes listen on it too, and the kernel deals connections
    out (SO_REUSEPORT).

    Raises:
        StartError: the port cannot be had.
    """
    listener = bound(host, port, shared=shared)
    listener.listen(BACKLOG)
    contexts = None if certificate is None else lambda *_: certificate.for_http()
    server = _Server(guarded(app, lifespan="off", timeout_graceful_shutdown=10, ssl_context_factory=contexts))
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def grpc_port(server: GrpcServer) -> AsyncIterator[int]:
    """Yields the port. Raises StartError."""
    try:
        port = await server.start()
    except OSError as error:
        raise StartError(str(error)) from error
    try:
        yield port
    finally:
        await server.stop()


@contextmanager
def reserved(host: str, port: int) -> Iterator[int]:
    """Keeps a port for processes that will share it, without listening; yields it, which tells what port 0 became.

    Raises:
        StartError: somebody else has it. Sharing is asked for only after that: two servers that both share would each
            get half of the other's connections, without a word.
    """
    with bound(host, port) as probe:
        port = probe.getsockname()[1]
    with bound(host, port, shared=True) as kept:
        yield kept.getsockname()[1]


def bound(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Raises StartError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}; use another port") from error
    return listener


class _Server(uvicorn.Server):
    """Leaves signals to `serve`: uvicorn's own handlers would end the process before the engine is stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
