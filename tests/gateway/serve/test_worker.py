"""How one gateway process of several obeys the process that started it, over a socket and open ports."""

from __future__ import annotations

import asyncio
import io
import socket
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from fakes import GatewayApp, build_gateway_app

from gateway.serve.orders import LISTEN, LISTENING
from gateway.serve.stopping import ORPHAN_SECONDS, Stop
from gateway.serve.worker import _obey
from gateway.terminal.console import Console
from tests.gateway.serve.test_departure import servers_of


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


@asynccontextmanager
async def obeying(gateway_app, stop):
    """A worker that listens; yields its task and the two ends of the stream at the fleet."""
    ours, theirs = socket.socketpair()
    app = SimpleNamespace(servers=servers_of(gateway_app, shared=True))
    task = asyncio.create_task(
        _obey(app, stop, *await asyncio.open_connection(sock=theirs), Console(file=io.StringIO()))
    )
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        async with asyncio.timeout(60):
            writer.write(LISTEN)
            assert await reader.readline() == LISTENING
            yield task, reader, writer
    finally:
        writer.close()
        task.cancel()
        await asyncio.wait((task,))


async def test_a_gateway_that_begins_to_end_says_at_once_that_no_answers_follow(gateway_app):
    async with obeying(gateway_app, Stop(60.0)) as (task, reader, _):
        with gateway_app.gateway.lifecycle.working():
            task.cancel()
            assert await reader.read() == b""
            assert not task.done(), "a request runs"
        await asyncio.wait((task,))


async def test_a_gateway_whose_fleet_has_died_is_an_orphan(gateway_app):
    stop = Stop(60.0)
    async with obeying(gateway_app, stop) as (task, _, writer):
        assert not stop.is_orphan
        writer.close()
        await task
        assert (stop.is_orphan, stop.drain_seconds) == (True, ORPHAN_SECONDS)
