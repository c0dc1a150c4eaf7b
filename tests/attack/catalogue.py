"""All attacks, and the attacker's process, which repeats one of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping

import httpx

from tests.attack import batches, disk, generations, masks, parse, sampler, wire_grpc, wire_http
from tests.attack.attacker import Attack, Attacker

ATTACKS: Mapping[str, Attack] = {
    **wire_grpc.ATTACKS,
    **wire_http.ATTACKS,
    **parse.ATTACKS,
    **batches.ATTACKS,
    **masks.ATTACKS,
    **sampler.ATTACKS,
    **disk.ATTACKS,
    **generations.ATTACKS,
    **parse.ATTACKS,
}
"""All attacks by name, in the order in which they are sent."""


def repeat(name: str, seconds: float, url: str, grpc_target: str, key: str, model: str) -> Counter[str]:
    """Repeat an attack for some seconds, at least once, in the attacker's process. Counts the answers of each kind."""
    return asyncio.run(_repeat(name, seconds, url, grpc_target, key, model))


async def _repeat(name: str, seconds: float, url: str, grpc_target: str, key: str, model: str) -> Counter[str]:
    headers, limits = {"authorization": f"Bearer {key}"}, httpx.Limits(max_connections=None)
    answers: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as http:
        ends = time.monotonic() + seconds
        while not answers or time.monotonic() < ends:
            answers += await ATTACKS[name](Attacker(http, grpc_target, model, key)) or Counter(["none"])
    return answers
