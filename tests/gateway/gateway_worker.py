"""One gateway process over a fake engine and a shared Redis, for tests that kill things: `gateway_worker.py '{...}'`.

Writes the port it listens on to standard output; then its request log. An engine's first pause is `hold` seconds, so that
requests can be caught in flight.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from fakes import build_house

from gateway.app import configure_logging
from gateway.core.limits import Limits
from gateway.core.tenants import Tenant
from gateway.http_guard import guarded
from gateway.limiter.failover import FailoverLimiter
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter
from gateway.request_log import RequestLog
from gateway.store import connect


async def serve(options: dict[str, Any]) -> None:
    async with connect(options["redis"]) as client:
        shared = RedisLimiter(client, timeout=2.0, lease_seconds=options.get("lease_seconds", 30.0), cooldown=0.05)
        local = LocalLimiter(options.get("replicas", 1), policy=options.get("policy", "degraded"))
        limiter = FailoverLimiter(shared, local)
        house = await build_house(Path(options["folder"]), limiter=limiter, request_log=RequestLog(sys.stderr))
        house.engine.info.max_model_len = 4096
        house.engine.pause = options.get("hold", 0.0)
        await limiter.configure(Tenant(name, limits=Limits(**limits)) for name, limits in options["limits"].items())
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        print(listener.getsockname()[1], flush=True)
        await uvicorn.Server(guarded(house.app, lifespan="off")).serve(sockets=[listener])


if __name__ == "__main__":
    configure_logging()
    asyncio.run(serve(json.loads(sys.argv[1])))
