"""Faults under online traffic, one after the other: the short version of `make chaos`."""

from __future__ import annotations

import pytest

from tests.chaos.faults import Calm, catalogue
from tests.chaos.load import Mix
from tests.chaos.trial import attempt

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.nightly]

LASTING = 0.3
MIX = Mix(callers=8, longest=20)
ONLY_LONG = {"KillStore", "clock-7200s", "slow-engine"}
ONLY_LONG |= {f"{manner}-{line}" for manner in ("refusing", "silent") for line in ("redis", "engine")}
"""Faults that others here are much like, or those of the batch jobs."""
FAULTS = [Calm(), *(fault for fault in catalogue() if str(fault) not in ONLY_LONG)]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_a_fault_leaves_no_trace(audited, fault):
    verdict = await attempt(*audited, fault, seed=7, lasting=LASTING, mix=MIX)
    assert not verdict.complaints, verdict
    assert verdict.requests.get("answered")
