"""One trial: traffic, a fault in the middle of it, its end, and then everything must be as before."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

from tests.chaos.deployment import Deployment
from tests.chaos.faults import Fault, Scene
from tests.chaos.invariants import Auditor
from tests.chaos.load import Load, Mix
from tests.chaos.patience import Late

CALM_SECONDS = 0.25
"""Before the fault, and after everything is ready again."""


@dataclass(frozen=True)
class Verdict:
    """What a trial has come to."""

    fault: str
    requests: dict[str, int]
    """How many ended how."""
    ready_seconds: float
    complaints: list[str]


async def attempt(
    deployment: Deployment, auditor: Auditor, fault: Fault, seed: int, lasting: float, mix: Mix
) -> Verdict:
    """`lasting`: seconds from the fault's beginning to its end."""
    load = Load(deployment.url, seed, mix)
    scene = Scene(deployment, load, Random(seed))
    complaints, ready_seconds = [], float("inf")
    load.start()
    try:
        await asyncio.sleep(CALM_SECONDS)
        await fault.begin(scene)
        await asyncio.sleep(lasting)
        await fault.end(scene)
        ready_seconds = await deployment.until_ready()
        await asyncio.sleep(CALM_SECONDS)
    except Late as late:
        complaints.append(str(late))
    finally:
        await load.stop()
    complaints += await auditor.complaints(load.outcomes, fault.harm)
    endings = [outcome.ending for outcome in load.outcomes]
    return Verdict(
        str(fault), {ending: endings.count(ending) for ending in sorted(set(endings))}, ready_seconds, complaints
    )
