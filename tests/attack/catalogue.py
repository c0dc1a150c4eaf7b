"""All attacks, and the attacker's process, which repeats one of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial

import httpx

from tests.attack import batches, disk, generations, masks, parse, sampler, wire_grpc, wire_http
from tests.attack.attacker import Attack, Attacker
from tests.attack.controls import CONTROLS

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
SMALL: Mapping[str, Attack] = {
    "refused gRPC messages without a key": partial(wire_grpc.refused_without_a_key, count=4),
    "gRPC messages that do not come": partial(wire_grpc.silent_calls, count=20, seconds=0.5),
    "trailers without end": partial(wire_http.endless_trailers, count=1, mebibytes=1),
    "a key in trailers": wire_http.key_in_trailers,
    "long heads": partial(wire_http.long_heads, count=30, seconds=0.2),
    "requests sent ahead": partial(wire_http.requests_sent_ahead, count=2, ahead=20),
    "unread documents": partial(wire_http.unread_documents, count=10, seconds=0.2),
    "unfinished bodies": partial(wire_http.unfinished_bodies, count=12, seconds=0.2),
    "requests behind an Upgrade": wire_http.requests_behind_an_upgrade,
    "token ids of one hash": partial(parse.colliding_ids, count=5_000),
    "many log probabilities": partial(parse.many_log_probabilities, answers=2, tokens=20),
    "slow checks of batch files": partial(batches.slow_checks, batches=2, lines=2),
    "cancels of large batches": partial(batches.large_cancels, batches=1, lines=200),
    "a grammar with slow masks and n = 30": partial(masks.slow_masks, count=1, answers=3, size=40),
    "wide nuclei": partial(sampler.wide_nuclei, count=4, tokens=8),
    "scored prompts": partial(sampler.scored_prompts, count=2, length=200),
    "uploads that fill the disk": partial(disk.uploads_that_fill_the_disk, count=2, size=100_000),
    "idle connections": partial(disk.idle_connections, count=20, seconds=0.2),
    **generations.ATTACKS,
    "a flood with n = 4": partial(generations.flood, count=120),
    "grammars that cost": partial(generations.expensive_grammars, count=4),
    "many grammars at once": partial(generations.many_grammars, count=60),
}
"""Attacks that are small enough for a test beside others."""


def repeat(name: str, seconds: float, url: str, grpc_target: str, key: str, model: str) -> Counter[str]:
    """Repeat an attack for some seconds, at least once, in the attacker's process. Counts the answers of each kind."""
    return asyncio.run(_repeat(name, seconds, url, grpc_target, key, model))


async def _repeat(name: str, seconds: float, url: str, grpc_target: str, key: str, model: str) -> Counter[str]:
    headers, limits = {"authorization": f"Bearer {key}"}, httpx.Limits(max_connections=None)
    answers: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as http:
        ends = time.monotonic() + seconds
        while not answers or time.monotonic() < ends:
            answers += await (ATTACKS | CONTROLS)[name](Attacker(http, grpc_target, model, key)) or Counter(["none"])
    return answers
