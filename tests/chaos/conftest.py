"""One plant for all tests here, which leave it as it was or fail."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.chaos.invariants import Auditor
from tests.chaos.plant import Kind, Plant, planted


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def audited(smollm2) -> AsyncIterator[tuple[Plant, Auditor]]:
    async with planted(Kind(smollm2)) as plant:
        yield plant, Auditor(plant)
