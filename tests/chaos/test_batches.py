"""Batch jobs that live through kills of everything they depend on: the short version of `make chaos`."""

from __future__ import annotations

import pytest
import pytest_asyncio

from tests.chaos.faults import KillEngine, KillGateway, KillStore, Together
from tests.chaos.invariants import Auditor
from tests.chaos.job_trial import JobPlan, JobTrial
from tests.chaos.plant import Kind, planted

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVERYTHING = Together((KillGateway(), KillEngine(), KillStore()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def audited(smollm2):
    async with planted(Kind(smollm2)) as plant:
        yield plant, Auditor(plant)


PLANS = {
    "completed": JobPlan((KillEngine(), KillGateway(), KillStore(), EVERYTHING)),
    "cancelled": JobPlan((KillStore(), KillGateway()), ending="cancelled", seed=1),
    "expired": JobPlan((KillGateway(), KillStore()), lines=400, ending="expired", window="6s", seed=2, spread=0.1),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
async def test_every_line_is_answered_once(audited, plan):
    verdict = await JobTrial(*audited, plan).run()
    assert not verdict.complaints, verdict
    assert verdict.output and verdict.errors and verdict.struck
    if plan.ending == "completed":
        assert verdict.struck == len(plan.faults)
