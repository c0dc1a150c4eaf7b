"""Requests that outlive their engine process, over real processes without a model."""

import asyncio
import os
import signal
from contextlib import aclosing

import pytest

from engine.config import EngineConfig
from engine.core.messages.requests import ErrorCode, FinishReason, Lane, Request, SamplingParams
from engine.executor.fake import FakeExecutor, fake_token
from engine.rpc.client import EngineClient
from engine.rpc.stream import CrashesEngines, GivenUp
from gateway.requests.answer.crash_trial import MOST_MOVES, CrashTrial
from gateway.requests.answer.resumption import Waits
from gateway.requests.submission import answer_stream
from gateway.serve.supervisor import EngineSupervisor
from tests.engine.poisonous_engine import CRASH, FATAL_TOKENS, HANG

pytestmark = pytest.mark.slow

PROGRAM = ("tests.engine.poisonous_engine", "--fake")
LENGTH = 200
"""Tokens of an answer: about a second."""


@pytest.fixture
async def supervisor(tmp_path):
    config = EngineConfig(model="fake", num_pages=4000, block_size=4, max_seqs=16, max_model_len=1000)
    async with EngineSupervisor(config, tmp_path / "engine.sock", PROGRAM) as running:
        yield running


@pytest.fixture
async def client(supervisor):
    client = EngineClient(supervisor.address)
    await client.start()
    await asyncio.wait_for(client.wait_ready(), 120)
    yield client
    await client.close()


def ask(name, seed=0, length=LENGTH, lane=Lane.INTERACTIVE, whole=False):
    params = SamplingParams(max_tokens=length, ignore_eos=True, seed=seed)
    return Request(name, (1, 2, 3), params, None, lane, whole=whole)


def expected(request):
    tokens = list(request.prompt_ids)
    for _ in range(request.params.max_tokens):
        tokens.append(fake_token(request.adapter_hash, request.params.seed, tokens, FakeExecutor().vocab_size))
    return tokens[len(request.prompt_ids) :]


class Reader:
    """Reads one answer to its end."""

    def __init__(self, client, request, wait_seconds=120.0):
        self.request, self.moves, self.events = request, [], []
        trial, waits = CrashTrial(client, False), Waits(wait_seconds, wait_seconds)
        self.stream = answer_stream(client, request, trial, waits, self.moves.append, lambda stream: None)
        self.task = asyncio.create_task(self.read())

    async def read(self):
        async with aclosing(self.stream) as stream:
            async for events in stream:
                self.events += events

    @property
    def tokens(self):
        return [token for event in self.events for token in event.tokens]

    async def until(self, count):
        async with asyncio.timeout(120):
            while len(self.tokens) < count and not self.task.done():
                await asyncio.sleep(0.005)

    async def assert_whole(self):
        await asyncio.wait_for(self.task, 120)
        assert self.tokens == expected(self.request)
        assert [e.finish_reason for e in self.events if e.finish_reason] == [FinishReason.LENGTH]
        assert [e.device_seconds for e in self.events] == sorted(e.device_seconds for e in self.events)
        assert sum(not e.tokens for e in self.events) <= 1, "it was admitted more than once"


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
async def test_answers_go_on_in_the_next_engine_process(client, supervisor, sign):
    lanes = [Lane.INTERACTIVE, Lane.BATCH]
    readers = [Reader(client, ask(f"r{i}", i, lane=lanes[i % 2], whole=i % 4 == 3)) for i in range(12)]
    await readers[0].until(20)
    pid = supervisor.pid
    os.kill(pid, sign)
    for reader in readers:
        await reader.assert_whole()
    assert supervisor.pid != pid
    assert [len(reader.moves) for reader in readers] == [1] * len(readers)
    assert not any((await client.stats(check=True)).violations)


@pytest.mark.parametrize("seed", [CRASH, HANG])
async def test_a_request_that_ends_engines_is_given_up_alone(client, supervisor, seed):
    readers = [Reader(client, ask(f"r{i}", i)) for i in range(6)]
    await readers[0].until(10)
    poison = Reader(client, ask("poison", seed))
    with pytest.raises(CrashesEngines):
        await asyncio.wait_for(poison.task, 120)
    for reader in readers:
        await reader.assert_whole()
    assert [len(reader.moves) for reader in readers] == [2] * len(readers)
    assert len(poison.moves) == 1 and len(poison.tokens) <= FATAL_TOKENS
    again = Reader(client, ask("again", 5))
    await again.assert_whole()


async def test_a_request_ends_if_the_next_engine_process_does_not_have_its_adapter(client, supervisor):
    adapter = (await client.load_adapter("some/adapter")).adapter
    reader = Reader(client, ask("adapted", 1)._replace(adapter_hash=adapter))
    await reader.until(5)
    os.kill(supervisor.pid, signal.SIGKILL)
    await asyncio.wait_for(reader.task, 120)
    assert reader.events[-1].finish_reason is FinishReason.ERROR
    assert reader.events[-1].refusal.code is ErrorCode.MODEL_NOT_FOUND


async def test_a_request_waits_for_an_engine_that_is_being_started(client, supervisor):
    os.kill(supervisor.pid, signal.SIGKILL)
    while client.ready:
        await asyncio.sleep(0.005)
    reader = Reader(client, ask("early", 1, 10))
    await reader.assert_whole()
    assert reader.moves == []


async def test_a_request_is_given_up_when_too_many_engines_end(client, supervisor):
    reader = Reader(client, ask("unlucky", 1, 900))
    for move in range(MOST_MOVES + 1):
        await reader.until(len(reader.tokens) + 5)
        assert len(reader.moves) == move
        os.kill(supervisor.pid, signal.SIGKILL)
    with pytest.raises(GivenUp, match="engine processes ended"):
        await asyncio.wait_for(reader.task, 120)
    assert reader.tokens == expected(reader.request)[: len(reader.tokens)]


async def test_a_request_is_given_up_when_no_engine_comes_back(client, supervisor, monkeypatch):
    reader = Reader(client, ask("waits", 1), wait_seconds=0.3)
    await reader.until(5)

    async def never():
        await asyncio.sleep(1000)

    monkeypatch.setattr(supervisor, "_spawn", never)
    os.kill(supervisor.pid, signal.SIGKILL)
    with pytest.raises(GivenUp, match=r"within 0\.3 s"):
        await asyncio.wait_for(reader.task, 60)


async def test_a_reader_that_leaves_while_there_is_no_engine_leaves_nothing(client, supervisor):
    reader = Reader(client, ask("left", 1))
    await reader.until(5)
    os.kill(supervisor.pid, signal.SIGKILL)
    while client.ready:
        await asyncio.sleep(0.005)
    reader.task.cancel()
    await asyncio.wait((reader.task,))
    await asyncio.wait_for(client.wait_ready(), 120)
    stats = await client.stats(check=True)
    assert not any(lane.running + lane.waiting for lane in stats.lanes)
