"""One plant for all tests here, which leave it as it was or fail."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.chaos.invariants import Auditor
from tests.chaos.plant import Kind, Plant, planted

PATIENCE_SECONDS = 40.0
"""For everything to be ready again. It takes a few, and ten are promised, which `make chaos` holds it to: here it may
share its cores with whatever else is tested."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def audited(smollm2) -> AsyncIterator[tuple[Plant, Auditor]]:
    async with planted(Kind(smollm2, ready_seconds=PATIENCE_SECONDS)) as plant:
        yield plant, Auditor(plant)
