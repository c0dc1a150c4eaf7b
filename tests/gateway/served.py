"""A gateway with a fake engine on real ports, in a thread with an event loop of its own, for clients that block."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from fakes import GatewayApp, build_gateway_app

from gateway.http.guard import GuardedProtocol
from gateway.http.server import guarded_config
from gateway.rpc.api import GrpcServer
from gateway.serve.process import run_loop


@dataclass(frozen=True)
class Served:
    gateway_app: GatewayApp
    url: str
    grpc_target: str
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """On the gateway's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)


@contextmanager
def served(
    root: Path,
    wrap: Callable[[Any], Any] = lambda app: app,
    protocol: type[GuardedProtocol] = GuardedProtocol,
    send_buffer: int = 0,
    **app_options: Any,
) -> Iterator[Served]:
    """`wrap`: puts an ASGI middleware around the application. `send_buffer`: bytes that the kernel takes unread."""
    listener = socket.socket()
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    ready: Future[Served] = Future()

    async def serve() -> None:
        gateway_app = await build_gateway_app(root, **app_options)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with GrpcServer(gateway_app.services, grace_seconds=0.0) as grpc_port:
            room = gateway_app.gateway.wire
            servers.append(uvicorn.Server(guarded_config(wrap(gateway_app.app), protocol, room=room, lifespan="off")))
            ready.set_result(Served(gateway_app, url, f"127.0.0.1:{grpc_port}", asyncio.get_running_loop()))
            await servers[0].serve(sockets=[listener])

    servers: list[uvicorn.Server] = []
    thread = Thread(target=run_loop, args=(serve(),))
    thread.start()
    try:
        yield ready.result(120)
    finally:
        servers[0].should_exit = True
        thread.join()


@asynccontextmanager
async def on_port(gateway_app: GatewayApp) -> AsyncIterator[str]:
    """Serve a gateway's HTTP API on this event loop, and yield its URL: for commands that run in threads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = guarded_config(gateway_app.app, GuardedProtocol, room=gateway_app.gateway.wire, lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
