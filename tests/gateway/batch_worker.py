"""One process that works on batches over a fake engine and a shared Redis, and is killed by a poisonous line."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from batch_cluster import BatchCluster
from fakes import ids_of, tiny_tokenizer
from redis.asyncio import Redis

from gateway.limiter.failover import FailoverLimiter
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter

tiny_tokenizer()  # before it is forked from, so that a worker starts in no time


def run(options: dict[str, Any]) -> None:
    """Work until it is killed."""
    asyncio.run(work(**options))


def _limiter(client: Redis) -> FailoverLimiter:
    return FailoverLimiter(RedisLimiter(client, timeout=60.0), LocalLimiter())


async def work(
    redis: str,
    folder: str,
    name: str,
    lease_seconds: float,
    poison: str,
    pause: float = 0.002,
    limits: bool = False,
) -> None:
    """`pause` is that of the engine between events. `limits` says whether to reserve, settle and count in Redis."""
    venom = ids_of(poison)

    def reply(request: Any) -> str:
        size = len(venom)
        if venom in {request.prompt_ids[at : at + size] for at in range(len(request.prompt_ids))}:
            os.kill(os.getpid(), signal.SIGKILL)
        return "ok"

    async with Redis.from_url(redis) as client:
        member = await BatchCluster(Path(folder), client, lease_seconds).add_member(
            name, limiter=_limiter(client) if limits else None
        )
        member.gateway_app.engine.reply = reply
        member.gateway_app.engine.pause = pause
        async with member.dispatcher:
            await asyncio.Event().wait()
