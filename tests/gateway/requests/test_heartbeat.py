"""An engine that hangs without dying is noticed, and a gateway that was itself stalled does not blame it."""

import asyncio
import os
import signal

import pytest
from fakes import build_gateway_app

from engine.config import EngineConfig
from engine.pb import engine_pb2 as pb
from engine.rpc.client import EngineClient
from gateway.requests import heartbeat
from gateway.requests.heartbeat import HANG_LOOKS, Heartbeat, heartbeat_running
from gateway.serve.supervisor import EngineSupervisor


class Engine:
    ready = True


def stats(steps, running=1):
    return pb.EngineStats(steps=steps, lanes=[pb.LaneStats(running=running)])


def pass_time(beat, seconds, told=None):
    for _ in range(seconds):
        if told is not None:
            beat.heard(told)
        beat.look()


def test_an_engine_with_work_that_ends_no_step_is_hung_until_it_moves():
    beat = Heartbeat(Engine())
    pass_time(beat, 1, stats(7))
    pass_time(beat, HANG_LOOKS, stats(7))
    assert beat.trouble == ""
    pass_time(beat, 1, stats(7))
    assert "stopped working" in beat.trouble
    pass_time(beat, 1, stats(8))
    assert beat.trouble == ""


def test_an_idle_engine_is_well_and_a_silent_one_is_not():
    beat = Heartbeat(Engine())
    pass_time(beat, 10 * HANG_LOOKS, stats(7, running=0))
    assert beat.trouble == ""
    pass_time(beat, HANG_LOOKS)
    assert beat.trouble == ""
    pass_time(beat, 1)
    assert "stopped working" in beat.trouble


def test_an_engine_whose_answers_come_more_rarely_than_the_looks_is_well():
    beat = Heartbeat(Engine())
    for steps in range(5):
        pass_time(beat, 1, stats(steps))
        pass_time(beat, HANG_LOOKS - 1)
        assert beat.trouble == ""


def test_an_engine_that_is_not_connected_is_told_apart():
    engine = Engine()
    beat = Heartbeat(engine)
    engine.ready = False
    assert beat.trouble == "the engine is not connected"
    pass_time(beat, HANG_LOOKS + 1)
    engine.ready = True
    assert beat.trouble == ""
    pass_time(beat, 1, stats(1))
    assert beat.trouble == ""


async def until(condition):
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_stopped_engine_process_is_noticed_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "LOOK_SECONDS", 0.07)
    monkeypatch.setattr(heartbeat, "ASK_SECONDS", 0.05)
    config = EngineConfig(model="fake", num_pages=1000, block_size=4, max_seqs=8, max_model_len=1000)
    async with EngineSupervisor(config, tmp_path / "engine.sock", ("engine.serve.server", "--fake")) as supervisor:
        client = EngineClient(supervisor.address)
        await client.start()
        await asyncio.wait_for(client.wait_ready(), 120)
        beat = Heartbeat(client)
        async with heartbeat_running(beat, client):
            os.kill(supervisor.pid, signal.SIGSTOP)
            await until(lambda: beat.trouble)
            os.kill(supervisor.pid, signal.SIGCONT)
            await until(lambda: not beat.trouble)
        await client.close()


@pytest.mark.parametrize("silent", [False, True])
async def test_ready_says_that_the_engine_hangs(tmp_path, silent):
    gateway_app = await build_gateway_app(tmp_path)
    gateway_app.gateway.models.default.heartbeat = Heartbeat(gateway_app.engine)
    if silent:
        pass_time(gateway_app.gateway.models.default.heartbeat, HANG_LOOKS + 1)
    async with gateway_app.client(None) as client:
        answer = await client.get("/ready")
    reason = "the engine is connected but has stopped working" if silent else None
    assert (answer.status_code, answer.json()["reason"]) == (503 if silent else 200, reason)
    assert answer.json()["engine"] is not silent
