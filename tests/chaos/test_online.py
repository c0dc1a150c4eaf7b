"""Faults under online traffic, one after the other, on one plant: the short version of `make chaos`."""

from __future__ import annotations

import pytest
import pytest_asyncio

from tests.chaos.faults import Calm, catalogue
from tests.chaos.invariants import Auditor
from tests.chaos.load import Mix
from tests.chaos.plant import Kind, planted
from tests.chaos.trial import attempt

pytestmark = pytest.mark.asyncio(loop_scope="module")

LASTING = 0.4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def audited(smollm2):
    async with planted(Kind(smollm2)) as plant:
        yield plant, Auditor(plant)


@pytest.mark.parametrize("fault", [Calm(), *catalogue()], ids=str)
async def test_a_fault_leaves_no_trace(audited, fault):
    verdict = await attempt(*audited, fault, seed=7, lasting=LASTING, mix=Mix(callers=8))
    assert not verdict.complaints, verdict
    assert verdict.requests.get("answered")
