"""One gateway process of several, as the process that keeps it alive sees it."""

import asyncio
import socket
from pathlib import Path

import pytest

from engine.rpc.target import EngineTarget
from gateway.config.whole import Config
from gateway.serve.backends import Backends, ModelPlace
from gateway.serve.fleet import GatewayProcess
from gateway.serve.launch import Launch, StartError
from gateway.serve.orders import Orders
from gateway.serve.stopping import Stop


@pytest.fixture
def member(monkeypatch):
    monkeypatch.setattr("gateway.serve.supervisor.FIRST_BACKOFF_SECONDS", 0.001)
    launch = Launch(Config(), Path("model"), Path("data"))
    place = ModelPlace({"engine-0": EngineTarget("unix:/engine")}, Path("model"))
    return GatewayProcess(Orders(0, launch, Backends("unix:///redis", {"tiny": place})), Stop())


def refuse(*_, **options):
    raise BlockingIOError("Resource temporarily unavailable")


async def test_a_gateway_that_cannot_be_started_is_tried_again(member, monkeypatch):
    starts, third = [], asyncio.Event()

    async def live():
        starts.append(len(starts))
        if len(starts) == 1:
            member._has_served = True
            return 1
        if len(starts) == 2:
            return await real()
        third.set()
        return await asyncio.Event().wait()

    real = member._run_once
    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    monkeypatch.setattr(member, "_run_once", live)
    running = asyncio.create_task(member.run())
    try:
        await asyncio.wait_for(third.wait(), 30)
        assert member.restarts == 2
    finally:
        running.cancel()
        await asyncio.wait((running,))


async def test_a_first_gateway_that_cannot_be_started_ends_the_start(member, monkeypatch):
    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    with pytest.raises(StartError, match="did not start"):
        await member.run()


async def test_a_gateway_that_is_about_to_end_is_asked_nothing_and_is_not_killed(member, monkeypatch):
    killed = []
    monkeypatch.setattr(member, "_kill", lambda: killed.append(1))
    ours, theirs = socket.socketpair()
    member._reader, member._writer = await asyncio.open_connection(sock=ours)
    with theirs:
        member.serving.set()
        seeding = asyncio.create_task(member.seed())
        await asyncio.sleep(0)
        theirs.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(30):
            assert await seeding is None
            assert not member.serving.is_set()
            await member.apply_settings(Config())
            await member.apply_settings(Config())
        assert not killed
    member._writer.close()
