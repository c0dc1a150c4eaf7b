"""The engine process as the gateway sees it: over a unix socket, supervised, without a model."""

import asyncio
import contextlib
import os
import random
import signal
import sys

import psutil
import pytest

from engine.config import EngineConfig
from engine.core.messages.requests import ErrorCode, FinishReason, Lane, Request, SamplingParams
from engine.executor.fake import FakeExecutor, fake_token
from engine.process.cores import SPINS
from engine.rpc.client import EngineClient
from engine.rpc.stream import EngineDrained, EngineUnavailable
from engine.rpc.target import EngineTarget
from gateway.serve.supervisor import EngineSupervisor

pytestmark = pytest.mark.slow

LONG = 100_000
"""Tokens of a request that is still running whatever a test does first."""


@pytest.fixture(autouse=True)
def spins_unset(monkeypatch):
    """The tests' own processes have it set, and an engine started from here would take it for its operator's wish."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)


@pytest.fixture
async def supervisor(tmp_path):
    config = EngineConfig(model="fake", num_pages=30_000, block_size=4, max_seqs=8, max_model_len=110_000)
    async with EngineSupervisor(config, tmp_path / "engine.sock", ("engine.serve.server", "--fake")) as running:
        yield running


@pytest.fixture
async def client(supervisor):
    client = EngineClient(supervisor.address)
    await client.start()
    await asyncio.wait_for(client.wait_ready(), 120)
    yield client
    await client.close()


async def test_an_engine_that_is_started_without_a_model_waits_for_its_name(tmp_path):
    config = EngineConfig(model="", num_pages=64, max_model_len=512)
    async with EngineSupervisor(config, tmp_path / "engine.sock", ("engine.serve.server", "--fake")) as supervisor:
        client = EngineClient(supervisor.address)
        await client.start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.wait_ready(), 1)
        supervisor.name_model(tmp_path / "a model")
        await asyncio.wait_for(client.wait_ready(), 120)
        assert client.info.model == str(tmp_path / "a model")
        supervisor.kill()  # the next process knows the name from its start
        await asyncio.wait_for(supervisor.wait_first_exit(), 60)
        async with asyncio.timeout(120):
            while supervisor.pid is None:
                await asyncio.sleep(0.01)
            await client.wait_ready()
        assert client.info.model == str(tmp_path / "a model")
        await client.close()


async def test_an_engine_that_waits_for_a_model_ends_with_its_standard_input(tmp_path):
    command = [sys.executable, "-m", "engine.serve.server", "--fake", "--config", EngineConfig(model="").to_json()]
    command += ["--address", f"unix:{tmp_path / 'engine.sock'}"]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 1
    assert errors.decode().splitlines()[-1] == "the gateway ended before the model was prepared"


def make_request(name, max_tokens=8, adapter_hash=None, lane=Lane.INTERACTIVE, seed=0):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed)
    return Request(name, (1, 2, 3), params, adapter_hash, lane)


def expected(request, count):
    tokens = list(request.prompt_ids)
    for _ in range(count):
        tokens.append(fake_token(request.adapter_hash, request.params.seed, tokens, FakeExecutor().vocab_size))
    return tokens[len(request.prompt_ids) :]


async def collect(client, request):
    return [event async for events in client.generate(request) for event in events]


async def until_empty(client):
    async with asyncio.timeout(60):
        while True:
            stats = await client.stats(check=True)
            assert list(stats.violations) == []
            if not any(lane.running + lane.waiting for lane in stats.lanes):
                return stats
            await asyncio.sleep(0.01)


async def until_running(client):
    async with asyncio.timeout(60):
        while not (await client.stats()).lanes[0].running:
            await asyncio.sleep(0.001)


async def test_streams_carry_every_token_once(client):
    requests = [make_request(f"r{i}", 20, seed=i) for i in range(30)]
    results = await asyncio.gather(*(collect(client, request) for request in requests))
    for request, events in zip(requests, results, strict=True):
        assert [token for event in events for token in event.tokens] == expected(request, 20)
        assert [event.finish_reason for event in events if event.finish_reason] == [FinishReason.LENGTH]


async def test_closing_a_stream_aborts_its_request(client):
    async with contextlib.aclosing(client.generate(make_request("long", LONG))) as events:
        async for arrived in events:
            if any(event.tokens for event in arrived):
                break
    stats = await until_empty(client)
    assert 0 < stats.generated_tokens < LONG


async def test_random_disconnects_leave_nothing(client):
    rng = random.Random(5)
    adapter_hash = (await client.load_adapter("some/adapter")).adapter

    async def one(index):
        request = make_request(f"r{index}", 40, rng.choice([None, adapter_hash]), rng.choice(list(Lane)))
        stop_after = rng.choice([0, 1, 5, 1000])
        async with contextlib.aclosing(client.generate(request)) as events:
            seen = 0
            async for arrived in events:
                seen += len(arrived)
                if seen > stop_after:
                    break

    await asyncio.gather(*(one(i) for i in range(64)))
    stats = await until_empty(client)
    assert stats.kv_pages == 0


async def test_a_refusal_says_why(client):
    (event,) = await collect(client, make_request("r", 2 * LONG))
    assert event.finish_reason is FinishReason.ERROR
    assert event.refusal.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


async def test_unloading_drains_then_frees(client):
    adapter_hash = (await client.load_adapter("a")).adapter
    stream = asyncio.create_task(collect(client, make_request("slow", LONG, adapter_hash)))
    await until_running(client)
    assert await client.unload_adapter(adapter_hash, drain_seconds=0) == 1
    assert (await stream)[-1].finish_reason is FinishReason.ABORT
    (event,) = await collect(client, make_request("late", 4, adapter_hash))
    assert event.refusal.code is ErrorCode.MODEL_NOT_FOUND
    assert (await client.stats()).adapter_pages == 0


async def test_a_killed_engine_fails_its_requests_and_comes_back(client, supervisor):
    pid = supervisor.pid
    stream = asyncio.create_task(collect(client, make_request("lost", LONG)))
    await until_running(client)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        await stream
    with pytest.raises(EngineUnavailable):
        await collect(client, make_request("early"))
    await asyncio.wait_for(client.wait_ready(), 120)
    assert supervisor.pid != pid
    request = make_request("again")
    assert [t for e in await collect(client, request) for t in e.tokens] == expected(request, 8)


FAILING_ENGINE = """
import sys
from engine.serve import server
from engine.config import EngineConfig
from engine.executor.fake import FakeExecutor
from engine.rpc.target import EngineTarget

def fail(self, plan):
    if plan.chunks:
        raise ValueError("a bug")

FakeExecutor.compute = fail
server.FakeExecutor = lambda: FakeExecutor(overlaps=sys.argv[2] == "ahead")
server.serve(EngineConfig(model="fake"), EngineTarget(sys.argv[1]), fake=True, until_stdin_closes=True)
"""


@pytest.mark.parametrize("loop", ["plain", "ahead"])
async def test_a_failing_step_ends_the_process(tmp_path, loop):
    """If the process lived on behind an open session, the supervisor would not start another one."""
    address = f"unix:{tmp_path / 'engine.sock'}"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FAILING_ENGINE, address, loop, stdin=pipe, stderr=pipe
    )
    client = EngineClient(address)
    try:
        await client.start()
        await asyncio.wait_for(client.wait_ready(), 120)
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(collect(client, make_request("fatal")), 60)
        _, words = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 1 and b"a bug" in words
    finally:
        await client.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()


SIGNALLED_ENGINE = """
import signal, sys, threading
from engine import engine
from engine.serve import server
from engine.config import EngineConfig
from engine.rpc.target import EngineTarget

class Inbox(engine.Inbox):
    def wait(self, timeout=None):
        threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()
        return super().wait(timeout)

engine.Inbox = Inbox
server.serve(EngineConfig(model="fake"), EngineTarget(sys.argv[1]), fake=True, until_stdin_closes=False)
"""


async def test_an_idle_engine_stops_whichever_thread_is_given_the_signal(tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SIGNALLED_ENGINE, f"unix:{tmp_path / 'engine.sock'}"
    )
    try:
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def resume_forever(client):
    while True:
        await client.drain(False)


async def test_an_engine_that_a_signal_drains_refuses_to_resume(tmp_path):
    config = EngineConfig(model="fake", num_pages=30_000, block_size=4, max_seqs=8, max_model_len=110_000)
    serve = ("engine.serve.server", "--fake")
    async with EngineSupervisor(config, tmp_path / "engine.sock", serve, drain_seconds=60.0) as supervisor:
        client = EngineClient(supervisor.address)
        await client.start()
        await asyncio.wait_for(client.wait_ready(), 120)
        running = asyncio.create_task(collect(client, make_request("long", LONG)))
        await until_running(client)
        await client.drain(False)
        os.kill(supervisor.pid, signal.SIGTERM)
        with pytest.raises(EngineDrained, match="told to end by a signal"):
            await asyncio.wait_for(resume_forever(client), 60)
        assert not running.done()
        supervisor.hurried.set()
        running.cancel()
        await client.close()


async def test_the_client_tries_again_after_any_failure(supervisor):
    calls = []

    async def restore():
        calls.append(len(calls))
        if len(calls) == 1:
            raise RuntimeError("a bug")

    client = EngineClient(supervisor.address)
    client.on_connect = restore
    await client.start()
    await asyncio.wait_for(client.wait_ready(), 120)
    await client.close()
    assert calls == [0, 1]


async def test_ctrl_c_in_a_terminal_is_not_the_engines(supervisor):
    assert os.getpgid(supervisor.pid) != os.getpgid(0)


async def test_threads_of_an_engine_soon_sleep_unless_its_operator_says_otherwise(supervisor, monkeypatch):
    environment = psutil.Process(supervisor.pid).environ()
    assert environment["GOMP_SPINCOUNT"] == str(SPINS)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    supervisor.kill()
    async with asyncio.timeout(60):
        while (again := supervisor.pid) is None or not psutil.pid_exists(again) or not _started_with(again, "active"):
            await asyncio.sleep(0.02)
    assert "GOMP_SPINCOUNT" not in psutil.Process(again).environ()


def _started_with(pid, policy):
    try:
        return psutil.Process(pid).environ().get("OMP_WAIT_POLICY") == policy
    except psutil.Error:
        return False


async def test_the_engine_ends_with_its_gateway(supervisor):
    process = supervisor._process
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 60) == 0


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.5:1", "engine.example:1"])
def test_an_engine_that_others_can_reach_needs_certificates(address):
    with pytest.raises(ValueError, match="needs tls"):
        EngineTarget(address)
    for own in ("unix:/run/engine.sock", "127.0.0.1:1", "[::1]:1", "localhost:1"):
        assert not EngineTarget(own).is_secure


@pytest.mark.parametrize("address", ["unix-abstract:x", ":1", "host", "host:0", "host:70000", "unix:"])
def test_a_malformed_address_is_refused(address):
    with pytest.raises(ValueError, match=r"address is like|must be from 1"):
        EngineTarget(address)
