"""Batch jobs that live through kills of everything they depend on: the short version of `make chaos`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.faults import KillEngine, KillGateway, KillStore, Together
from tests.chaos.job_trial import JobPlan, JobTrial, JobVerdict

pytestmark = pytest.mark.asyncio(loop_scope="session")

EVERYTHING = Together((KillGateway(), KillEngine(), KillStore()))
PLANS = (
    pytest.param(JobPlan((KillEngine(), KillGateway(), EVERYTHING), lines=150), id="completed"),
    pytest.param(
        JobPlan((KillStore(), KillGateway()), ending="cancelled", seed=1), id="cancelled", marks=pytest.mark.nightly
    ),
    pytest.param(
        JobPlan((KillGateway(), KillStore()), lines=640, ending="expired", window="8s", seed=2, spread=0.01),
        id="expired",
        marks=pytest.mark.nightly,
    ),
)


@pytest.mark.parametrize("plan", PLANS)
async def test_every_line_is_answered_once(audited, plan):
    verdict = await verdict_of(audited, plan)
    assert not verdict.complaints, verdict
    assert verdict.output and verdict.errors and verdict.struck


async def verdict_of(audited, plan: JobPlan) -> JobVerdict:
    """Run a job. If its window was over before the input was checked, as on a busy machine, run one with a window twice
    as long."""
    verdict = await JobTrial(*audited, plan).run()
    if plan.ending != "expired" or verdict.counts["total"]:
        return verdict
    return await verdict_of(audited, replace(plan, window=f"{2 * int(plan.window.removesuffix('s'))}s"))
