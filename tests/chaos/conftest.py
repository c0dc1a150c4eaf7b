"""One deployment for all tests of this folder, each of which must leave it as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.chaos.deployment import Deployment, Kind, deployed
from tests.chaos.invariants import Auditor

PATIENCE_SECONDS = 40.0
"""For everything to be ready again. It takes a few, and ten are promised, which `make chaos` holds it to: here it may
share its cores with whatever else is tested."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def audited(smollm2) -> AsyncIterator[tuple[Deployment, Auditor]]:
    async with deployed(Kind(smollm2, ready_seconds=PATIENCE_SECONDS)) as deployment:
        yield deployment, Auditor(deployment)
