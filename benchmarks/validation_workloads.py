"""Workloads of `make bench-validation`, and the speed of the machine for which their rates are scaled."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

from lab.devices.cost import StepWork
from lab.devices.device import find_device
from lab.traffic.scenario import Scenario
from lab.traffic.synthetic import Sizes
from lab.traffic.workload import Backlog, Workload

ADAPTERS = 64
BUSY_S = 60.0
"""Seconds for which an engine is kept busy; the second half is measured. Batch work alone may take longer steps the
longer there was no interactive work (`limits.YIELD_SHARE`), up to a maximum that it reaches after 25 s. `plan`
assumes that steps are never shortened, as they are on a slow CPU before that time."""
CHAT = ("32-256", "16-96")
REFERENCE = "cpu-smollm2"
"""Device for which the workloads' rates were chosen. They are scaled by this machine's speed relative to it, because an
engine near its capacity amplifies each error of a step's duration: at 1.05 times the capacity, TTFT p50 erred by 9 to
78 % where steps erred by 4 to 12 %."""
Loops = list[tuple[StepWork, float]]
"""Steps of closed loops: work, and real seconds."""


def traffic(rate: float, seconds: float, sizes: tuple[str, str], seed: int, **options: Any) -> Workload:
    prompt, output = (Sizes.parse(text) for text in sizes)
    return Scenario(rate=rate, seconds=seconds, prompt=prompt, output=output, seed=seed, **options).workload()


def for_speed(workload: Workload, speed: float) -> Workload:
    """Return the workload for a machine of this speed (see `REFERENCE`): arrivals are `speed` times as frequent."""
    arrivals = [arrival._replace(time=arrival.time / speed) for arrival in workload.trace]
    return replace(workload, trace=arrivals, horizon=workload.horizon / speed)


def speed_of(steps: Loops) -> float:
    """Return how fast this machine computed these steps: 1 means as fast as `REFERENCE`."""
    cost = find_device(REFERENCE).cost
    return sum(cost.seconds(work) for work, _ in steps) / sum(seconds for _, seconds in steps)


def make_workloads(seconds: float, seed: int) -> dict[str, Workload]:
    """Return the eight workloads, whose rates suit an engine on the device `REFERENCE`."""
    rng, backlog = Random(seed), Backlog(16, Sizes(64, 256), Sizes(64, 160))
    shared = traffic(1.2, seconds, ("600-1200", "16-64"), seed)
    return {
        "chats": traffic(1, seconds, CHAT, seed),
        "busy chats": traffic(3, seconds, CHAT, seed),
        "bursts": traffic(2, seconds, CHAT, seed, cv=3),
        "48 at once": for_speed(traffic(48 / seconds, seconds, ("32-256", "16-128"), seed), math.inf),
        "long prompts": traffic(0.5, seconds, ("512-1536", "8-32"), seed),
        "64 adapters": traffic(2, seconds, CHAT, seed, adapters=ADAPTERS, zipf=1.0),
        "beside a backlog": traffic(1, seconds, CHAT, seed, backlog=backlog),
        "shared prefixes": replace(shared, trace=[one._replace(blocks=(rng.randrange(3),)) for one in shared.trace]),
    }


def saturated(adapters: int, seed: int, seconds: float = BUSY_S) -> Workload:
    """Return a workload that keeps an engine busy: 48 requests at any time."""
    return Workload([], seconds, Backlog(48, Sizes.parse(CHAT[0]), Sizes.parse(CHAT[1])), adapters, 0.0, seed)
