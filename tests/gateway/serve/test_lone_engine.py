"""`loralane engine`: where it listens, what is checked before it loads a model, and what becomes of gateways when its
process ends."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
import sys
from contextlib import AsyncExitStack, aclosing, closing
from dataclasses import replace

import pytest
from rich.console import Console

from engine.config import EngineConfig
from engine.core.messages.requests import Request, SamplingParams
from engine.rpc.client import EngineClient
from engine.rpc.stream import EngineUnavailable
from engine.rpc.target import EngineTls
from gateway.config.models import EnginesConfig, ModelConfig, ModelSettings
from gateway.serve.launch import StartError
from gateway.serve.lone_engine import engine_listening, reserve_address, serve_engine
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import Stop
from tests.engine.rpc.test_transport import files
from tests.gateway.certificates import Authority

FAKE = ("engine.serve.server", "--fake")


@pytest.fixture
def settings(tmp_path):
    """Settings of a model that is prepared, which a fake engine needs not read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return ModelSettings(ModelConfig(str(folder)), EngineConfig(model="", num_pages=200, max_model_len=1000))


def listening(settings, listen, data_dir, program=FAKE):
    return engine_listening(settings, listen, data_dir, Stop(), StartBar.hidden(), program)


async def tokens_of(client, name):
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=7)
    async with aclosing(client.generate(Request(name, (1, 2, 3), params))) as stream:
        return [token async for events in stream for event in events for token in event.tokens]


@pytest.mark.slow
async def test_a_killed_engine_is_started_again_and_its_gateways_reconnect(settings, tmp_path):
    async with listening(settings, "127.0.0.1:0", tmp_path) as supervisor:
        client = EngineClient(supervisor.address)
        await client.start()
        async with asyncio.timeout(60):
            await client.wait_ready()
            answer, life, pid = await tokens_of(client, "before"), client.info.life, supervisor.pid
            os.kill(pid, signal.SIGKILL)
            while client.ready:
                await asyncio.sleep(0.01)
            await client.wait_ready()
        assert supervisor.pid != pid
        assert client.info.life != life
        assert (client.info.previous.life, client.info.previous.crashed) == (life, False)
        assert await tokens_of(client, "after") == answer
        await client.close()


@pytest.mark.slow
async def test_an_engine_that_stops_lets_its_requests_end(settings, tmp_path):
    slow = ("tests.e2e.slow_engine", "--fake")
    async with AsyncExitStack() as stack:
        supervisor = await stack.enter_async_context(listening(settings, "127.0.0.1:0", tmp_path, slow))
        client = EngineClient(supervisor.address)
        news = []
        client.on_news = news.append
        await client.start()
        stack.push_async_callback(client.close)
        async with asyncio.timeout(120):
            await client.wait_ready()
            params = SamplingParams(max_tokens=60, ignore_eos=True, seed=7)
            async with aclosing(client.generate(Request("r", (1, 2, 3), params))) as stream:
                tokens = [token for event in await anext(stream) for token in event.tokens]
                ending = asyncio.create_task(supervisor._stop())
                async for events in stream:
                    tokens += [token for event in events for token in event.tokens]
            assert len(tokens) == 60
            assert any(each.draining for each in news), "gateways move their requests"
            await ending
        assert supervisor.pid is None


@pytest.mark.slow
async def test_a_hurried_stop_does_not_wait_for_an_engines_requests(settings, tmp_path):
    slow = ("tests.e2e.slow_engine", "--fake")
    stop = Stop()
    listening = engine_listening(settings, "127.0.0.1:0", tmp_path, stop, StartBar.hidden(), slow)
    async with asyncio.timeout(120), listening as supervisor:
        client = EngineClient(supervisor.address)
        await client.start()
        await client.wait_ready()
        params = SamplingParams(max_tokens=900, ignore_eos=True, seed=7)
        async with aclosing(client.generate(Request("r", (1, 2, 3), params))) as stream:
            await anext(stream)
            ending = asyncio.create_task(supervisor._stop())
            await asyncio.sleep(0)
            stop.hurried.set()
            async with asyncio.timeout(30):  # the request would take 45 s
                await ending
            with pytest.raises(EngineUnavailable):
                async for _ in stream:
                    pass
        await client.close()


@pytest.mark.slow
async def test_an_engine_chooses_a_free_port_and_tells_it(settings, tmp_path):
    told = io.StringIO()
    serving = asyncio.create_task(
        serve_engine(settings, "127.0.0.1:0", tmp_path, Console(file=told, width=200), program=FAKE)
    )
    async with asyncio.timeout(60):
        while not (found := re.search(r"ready: (127\.0\.0\.1:[1-9][0-9]*)\n", told.getvalue())):
            assert not serving.done(), await serving
            await asyncio.sleep(0.01)
        client = EngineClient(found[1])
        await client.start()
        await client.wait_ready()
        assert len(await tokens_of(client, "r")) == 20
        await client.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving is False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the port is only looked at")
def test_the_port_is_kept_from_other_programs_until_the_engine_listens():
    with reserve_address("127.0.0.1:0", None) as target:
        host, _, port = target.address.rpartition(":")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        with socket.socket() as engine:
            engine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            engine.bind((host, int(port)))
            engine.listen()


@pytest.fixture
def no_process(monkeypatch):
    """Fail if an engine process is started, or a model prepared."""

    async def fail(*args, **options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)


async def refusal(settings, listen, data_dir):
    with pytest.raises(StartError) as caught:
        async with listening(settings, listen, data_dir):
            pass
    return str(caught.value)


async def test_an_address_that_cannot_be_used_is_refused_before_the_model_is_prepared(settings, tmp_path, no_process):
    unprepared = replace(settings, model=ModelConfig(str(tmp_path / "unprepared")))
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        for own in (settings, unprepared):
            said = await refusal(own, listen, tmp_path)
            assert said == f"cannot listen on {listen}: Address already in use; use another port"
    said = await refusal(settings, "192.0.2.1:0", tmp_path)
    assert said.endswith("use another host")
    assert "cannot listen on no-such-host.invalid:7001: " in await refusal(
        settings, "no-such-host.invalid:7001", tmp_path
    )
    assert "needs tls" in await refusal(settings, "0.0.0.0:0", tmp_path)
    assert "like host:7001" in await refusal(settings, "7001", tmp_path)
    assert "there is no folder" in await refusal(settings, f"unix:{tmp_path}/absent/socket", tmp_path)


async def test_tls_files_that_cannot_be_used_are_named_before_the_model_is_prepared(settings, tmp_path, no_process):
    ours, theirs = files(Authority.at(tmp_path / "a"), "engine"), files(Authority.at(tmp_path / "b"), "engine")
    absent = replace(settings, engines=EnginesConfig(tls=replace(ours, ca=tmp_path / "absent.pem")))
    assert f"cannot read {tmp_path}/absent.pem" in await refusal(absent, "127.0.0.1:0", tmp_path)
    mixed = EngineTls(ours.ca, ours.certificate, theirs.key)
    said = await refusal(replace(settings, engines=EnginesConfig(tls=mixed)), "127.0.0.1:0", tmp_path)
    assert "do not belong together" in said


@pytest.mark.slow
async def test_the_command_says_why_it_cannot_listen(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        command = (sys.executable, "-m", "gateway", "engine", "--listen", listen, "--data-dir", str(tmp_path))
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "Address already in use; use another port" in " ".join(said.decode().split())
