"""One trial: traffic, a fault in the middle of it, its end, and then everything must be as before."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from random import Random

from tests.chaos.deployment import Deployment
from tests.chaos.faults import Fault, Scene
from tests.chaos.invariants import Auditor
from tests.chaos.load import Load, Mix, ask_again
from tests.chaos.patience import Late
from tests.chaos.records import fetches_of

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
    fetches: dict[str, int]
    """How many transfers of KV between engines ended how, without those that engines counted which were killed."""


async def attempt(
    deployment: Deployment, auditor: Auditor, fault: Fault, seed: int, lasting: float, mix: Mix
) -> Verdict:
    """`lasting`: seconds from the fault's beginning to its end."""
    load = Load(deployment.url, seed, mix)
    scene = Scene(deployment, load, Random(seed))
    complaints, ready_seconds = [], float("inf")
    fetches = await fetches_of(deployment)
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
    # A model's right answers are those that it gives when nothing is wrong; fake ones are known.
    again = [] if deployment.kind.fake else await ask_again(deployment.url, load.outcomes)
    complaints += await auditor.complaints([*load.outcomes, *again], fault.harm)
    endings = Counter(outcome.ending for outcome in load.outcomes)
    fetches = await fetches_of(deployment) - fetches
    return Verdict(str(fault), dict(sorted(endings.items())), ready_seconds, complaints, dict(fetches))
