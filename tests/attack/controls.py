"""Controls: phases in which the attacker's process does nothing hostile, so that their cost is no fault of the server.

In one the process only computes, because on two cores it takes processor time from the server and the neighbour. In the
other it is an honest tenant with a few chats, because a tenant is entitled to its share of the engine. The bounds on
the neighbour's times beside attacks follow from the larger of its times alone and beside these controls.
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
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        sum(range(10_000))
    return Counter(["computed"])


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
