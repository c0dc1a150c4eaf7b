"""A batch job that lives through faults: every line must be answered once, and nothing be left of it but its files."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from tests.chaos.deployment import Deployment
from tests.chaos.faults import Fault, Harm, Scene
from tests.chaos.invariants import Auditor
from tests.chaos.job import TERMINAL, Customer, Result, lines_of
from tests.chaos.load import Load
from tests.chaos.patience import Late, until

STALLED_SECONDS = 8.0
"""Without progress for so long, the next fault comes all the same."""
SWEPT_SECONDS = 75.0
"""What a gateway was killed over while it wrote a file stays charged for a minute."""
LONGEST_FAULT = 1.0
KINDS = ("batchwork", "batchholders", "batchbits", "batchparts", "batchesopen", "file-pins", "file-held", "file-leases")
"""Lists the kinds of keys that are in Redis only while a job or an upload is under way."""

Ending = Literal["completed", "cancelled", "expired"]


@dataclass(frozen=True)
class JobPlan:
    """A job, and what happens to it: faults evenly over its lines, the cancelling in the middle of them."""

    faults: Sequence[Fault]
    lines: int = 200
    ending: Ending = "completed"
    window: str = "24h"
    longest: int = 150
    """Tokens of an answer."""
    spread: float = 1.0
    """Share of its lines over which the faults come."""
    seed: int = 0

    @property
    def harm(self) -> Harm:
        harm = Harm.NONE
        for fault in self.faults:
            harm |= fault.harm
        return harm


@dataclass(frozen=True)
class JobVerdict:
    counts: dict[str, Any]
    output: int
    errors: int
    struck: int
    """Faults that came before the job's end."""
    complaints: list[str]

    @property
    def told(self) -> str:
        return f"{self.counts}, {self.output} lines of output, {self.errors} of errors"


class JobTrial:
    """One job."""

    def __init__(self, deployment: Deployment, auditor: Auditor, plan: JobPlan) -> None:
        self._deployment = deployment
        self._auditor = auditor
        self._plan = plan
        self._customer = Customer(deployment)
        self._random = Random(plan.seed)
        self._load = Load(deployment.url, plan.seed)
        """Sends the requests of faults that are traffic themselves."""
        self._struck = 0

    async def run(self) -> JobVerdict:
        plan = self._plan
        asks = lines_of(plan.seed, plan.lines, plan.longest)
        job = await self._customer.submit(asks, plan.window)
        await self._strike(job["id"])
        job = await self._customer.until_ended(job["id"])
        await self._deployment.until_ready()
        result = await Result.of(self._customer, job)
        complaints = result.complaints(asks, [plan.ending], checks_answers=self._deployment.kind.fake)
        if plan.ending == "completed" and self._struck < len(plan.faults):
            complaints.append(f"it was over after {self._struck} of {len(plan.faults)} faults")
        complaints += await self._leftovers() + await self._auditor.complaints(self._load.outcomes, plan.harm)
        return JobVerdict(job["request_counts"], len(result.output), len(result.errors), self._struck, complaints)

    async def _strike(self, batch_id: str) -> None:
        faults = self._plan.faults
        scene = Scene(self._deployment, self._load, self._random)
        for number, fault in enumerate(faults):
            if not await self._has_come_to(self._plan.spread * (number + 1) / (len(faults) + 1), batch_id):
                return
            if self._plan.ending == "cancelled" and number == len(faults) // 2:
                await self._customer.cancel(batch_id)
            self._struck += 1
            await fault.begin(scene)
            await asyncio.sleep(LONGEST_FAULT * self._random.random())
            await fault.end(scene)

    async def _has_come_to(self, share: float, batch_id: str) -> bool:
        """Waits for so many of its lines, or for no progress at all; whether the job goes on."""
        most = -1
        since = now = asyncio.get_running_loop().time()
        while now - since < STALLED_SECONDS:
            job = await self._customer.job(batch_id)
            if job["status"] in TERMINAL:
                return False
            done = job["request_counts"]["completed"] + job["request_counts"]["failed"]
            if job["status"] != "validating" and done >= share * self._plan.lines:
                return True
            now = asyncio.get_running_loop().time()
            since, most = (now, done) if done > most else (since, most)
            await asyncio.sleep(0.05)
        return True

    async def _leftovers(self) -> list[str]:
        """Return what is left of the job in Redis and the storage when its sweep has had its time."""
        left: list[str] = []

        async def is_swept() -> bool:
            await self._customer.touch_files()
            left[:] = await _keys(self._deployment) + _objects(self._deployment.folder / "data" / "files")
            return not left

        with suppress(Late):
            await until(is_swept, SWEPT_SECONDS, "the job to be swept")
        return [f"left behind: {name}" for name in left]


async def _keys(deployment: Deployment) -> list[str]:
    async with deployment.store.client() as redis:
        found = [key.decode() for kind in KINDS async for key in _matching(redis, f"loralane:{kind}:*")]
        return found + [
            f"in the index: {entry}" for entry in await redis.zrange("loralane:batchindex:{batches}", 0, -1)
        ]


async def _matching(redis: Any, pattern: str) -> Any:
    async for key in redis.scan_iter(pattern, count=1000):
        yield key


def _objects(storage: Path) -> list[str]:
    """Which are neither files of a tenant nor what a killed process had begun to write."""
    found = [str(path.relative_to(storage)) for path in storage.rglob("*") if path.is_file()]
    return [name for name in found if not name.startswith(("files/", "partial/"))]
