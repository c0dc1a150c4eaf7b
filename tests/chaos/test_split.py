"""Engines of split requests, killed in the middle of a transfer: the short version of what `make chaos` does."""

from __future__ import annotations

import pytest

from tests.chaos.conftest import PATIENCE_SECONDS
from tests.chaos.deployment import Kind, deployed
from tests.chaos.invariants import Auditor
from tests.chaos.load import Mix
from tests.chaos.split_faults import ROLES, KillPart
from tests.chaos.trial import attempt

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.nightly]

MIX = Mix(callers=8, longest=20, longest_prompt=300)


async def test_the_prompts_engine_is_killed_during_a_transfer(smollm2):
    async with deployed(Kind(smollm2, gateways=1, ready_seconds=PATIENCE_SECONDS, roles=ROLES)) as deployment:
        fault = KillPart("prefill", "during")
        verdict = await attempt(deployment, Auditor(deployment), fault, seed=7, lasting=0.3, mix=MIX)
    assert not verdict.complaints, verdict
    assert verdict.requests.get("answered") and verdict.fetches.get("cut")
