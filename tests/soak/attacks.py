"""Mounts attacks at random in every other round, and compares what a neighbour tenant sees with the rounds between."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Awaitable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.attack.catalogue import ATTACKS, repeat
from tests.attack.neighbour import Neighbour, Seen, neighbour_process
from tests.attack.verdict import MOST_TIMES, p99
from tests.soak.house import KEYS, MODEL, House

LOWEST_PRIORITY = 19
"""Niceness of the attacker's process, because a real attacker has its own machine."""


@dataclass
class Attacks:
    """What the neighbour saw in rounds with attacks and in those without."""

    house: House
    attacker: Executor
    neighbour: Neighbour
    dice: random.Random
    calm: Seen = field(default_factory=Seen)
    attacked: Seen = field(default_factory=Seen)

    async def beside(self, work: Awaitable[Counter[str]], *, attacking: bool) -> Counter[str]:
        """Await a round's work beside the neighbour and, if `attacking`, attacks. Returns what the work counted, and
        each attack."""
        self.neighbour.begin()
        working = asyncio.ensure_future(work)
        mounted = await self._mount_until(working) if attacking else Counter[str]()
        outcomes = await working
        (self.attacked if attacking else self.calm).add(await self.neighbour.end())
        return outcomes + mounted

    async def _mount_until(self, working: asyncio.Future[Counter[str]]) -> Counter[str]:
        mounted: Counter[str] = Counter()
        while not working.done():
            name = self.dice.choice(sorted(ATTACKS))
            words = (name, 0.0, self.house.url, self.house.grpc, KEYS["attacker"], MODEL)
            try:
                await asyncio.get_running_loop().run_in_executor(self.attacker, repeat, *words)
                mounted[f"attack: {name}"] += 1
            except Exception as error:  # a refused or cut off attacker is no failure of the server
                mounted[f"attack: {name}: {type(error).__name__}"] += 1
        return mounted

    def failures(self) -> list[str]:
        """Return a sentence for each way in which the neighbour noticed the attacks."""
        found = [*self.calm.failures, *self.attacked.failures]
        for what in ("ttft", "itl"):
            beside, alone = p99(getattr(self.attacked, what)), p99(getattr(self.calm, what))
            if beside > MOST_TIMES * alone:
                found.append(
                    f"the neighbour's p99 {what} is {beside * 1e3:.0f} ms in rounds with attacks and"
                    f" {alone * 1e3:.0f} ms in others"
                )
        return found


@contextmanager
def attacks_on(house: House, seed: int) -> Iterator[Attacks]:
    """Run the processes of the attacker and the neighbour until the block ends."""
    with (
        ProcessPoolExecutor(1, get_context("spawn"), os.nice, (LOWEST_PRIORITY,)) as attacker,
        neighbour_process(house.url, KEYS["neighbour"], MODEL) as neighbour,
    ):
        yield Attacks(house, attacker, neighbour, random.Random(seed))
