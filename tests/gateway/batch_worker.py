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

tiny_tokenizer()  # before it is forked from, so that a worker starts in no time


def run(options: dict[str, Any]) -> None:
    """Work until it is killed."""
    asyncio.run(work(**options))


async def work(redis: str, folder: str, name: str, lease_seconds: float, poison: str) -> None:
    venom = ids_of(poison)

    def reply(request: Any) -> str:
        size = len(venom)
        if venom in {request.prompt_ids[at : at + size] for at in range(len(request.prompt_ids))}:
            os.kill(os.getpid(), signal.SIGKILL)
        return "ok"

    async with Redis.from_url(redis) as client:
        member = await BatchCluster(Path(folder), client, lease_seconds).add_member(name)
        member.gateway_app.engine.reply = reply
        member.gateway_app.engine.pause = 0.002
        async with member.dispatcher:
            await asyncio.Event().wait()
