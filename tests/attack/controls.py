"""What a neighbour notices of no attack at all: a machine that computes for another program, and a tenant that chats.

Attacks are judged by these, too. On two cores the attacker's own process takes one of the four that need them, and a
tenant is entitled to its half of the engine: neither is a fault of the server.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping

from tests.attack.attacker import Attack, Attacker

SECONDS = 3.0


async def busy_processor(_attacker: Attacker, seconds: float = SECONDS) -> Counter[str]:
    """Compute, and ask the server for nothing."""
    ends, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        rounds += sum(range(10_000)) > 0
    return Counter({"rounds": rounds})


async def honest_chats(attacker: Attacker, at_once: int = 4, seconds: float = SECONDS) -> Counter[str]:
    """Hold a few chats at the same time, one question after the other."""
    ends = time.monotonic() + seconds

    async def talk() -> Counter[str]:
        answers: Counter[str] = Counter()
        while time.monotonic() < ends:
            answers[await attacker.chat(max_tokens=32, ignore_eos=True)] += 1
        return answers

    return sum(await asyncio.gather(*(talk() for _ in range(at_once))), Counter())


CONTROLS: Mapping[str, Attack] = {
    "control: a busy processor": busy_processor,
    "control: an honest tenant": honest_chats,
}
