"""One gateway process over a fake engine and a shared Redis, for tests that kill things."""

from __future__ import annotations

import asyncio
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
from fakes import build_gateway_app, tiny_tokenizer

from gateway.core.limits import Limits
from gateway.core.tenants import Tenant
from gateway.http.server import guarded_config
from gateway.limiter.failover import FailoverLimiter
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter
from gateway.redis.connect import connect_server
from gateway.responses import background
from gateway.responses.service import Responses
from gateway.responses.store import ResponseStore, StoreLimits

tiny_tokenizer()  # before a test forks a worker, which then starts in no time


def run(options: dict[str, Any], port: Connection) -> None:
    """Sends the port it listens on, and serves until it is killed."""
    asyncio.run(serve(options, port))


async def serve(options: dict[str, Any], port: Connection) -> None:
    async with connect_server(options["redis"]) as client:
        shared = RedisLimiter(client, timeout=60.0, lease_seconds=options.get("lease_seconds", 30.0), cooldown=0.05)
        local = LocalLimiter(options.get("replicas", 1))
        limiter = FailoverLimiter(shared, local)
        stored = ResponseStore(client, StoreLimits(lease_seconds=options.get("response_lease_seconds", 15.0)))
        folder, responses = Path(options["folder"]), Responses(stored)
        background.RENEW_SECONDS = stored.limits.lease_seconds / 8
        gateway_app = await build_gateway_app(folder, limiter=limiter, responses=responses)
        gateway_app.engine.info.max_model_len = 4096
        gateway_app.engine.pause = options.get("pause", 0.0)
        await limiter.configure(Tenant(name, limits=Limits(**limits)) for name, limits in options["limits"].items())
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port.send(listener.getsockname()[1])
        await uvicorn.Server(guarded_config(gateway_app.app, lifespan="off")).serve(sockets=[listener])
