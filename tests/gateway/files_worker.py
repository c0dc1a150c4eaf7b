"""One gateway process with files, for tests that look at its memory, or kill it."""

from __future__ import annotations

import asyncio
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import uvicorn
from fakes import build_gateway_app, tiny_tokenizer
from file_fakes import build_files

from gateway.files.service import FileLimits
from gateway.http.server import guarded_config
from gateway.redis.connect import connect_server

tiny_tokenizer()  # before a test forks a worker, which then starts in no time


def run(redis: str, folder: Path, port: Connection, lease_seconds: float) -> None:
    """Sends the port it listens on, and serves until it is killed."""
    asyncio.run(serve(redis, folder, port, lease_seconds))


async def serve(redis: str, folder: Path, port: Connection, lease_seconds: float) -> None:
    async with connect_server(redis) as client:
        limits = FileLimits(2**30, 2**30, 100)
        files = build_files(client, folder / "stored", limits, lease_seconds=lease_seconds)
        gateway_app = await build_gateway_app(folder, files=files)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port.send(listener.getsockname()[1])
        await uvicorn.Server(guarded_config(gateway_app.app, lifespan="off")).serve(sockets=[listener])
