"""The client and an engine's service over a real socket, in one process: what goes wrong, and who is to blame."""

import asyncio
import threading

import pytest

from engine.core.config import CoreConfig
from engine.core.messages.requests import Lane, LaneMode, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.executor.fake import FakeExecutor
from engine.inbox import EngineStopped
from engine.pb import engine_pb2 as pb
from engine.rpc.api import AdapterRejected
from engine.rpc.client import EngineClient
from engine.rpc.service import EngineService
from engine.rpc.stream import EngineUnavailable
from engine.rpc.wire import PROTOCOL
from engine.serve.server import _listen


class FailingLoads(FakeExecutor):
    """Adapters that fail to be read in every way a folder can have them fail."""

    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()

    def load_host(self, path, claim):
        if path == "invalid":
            raise ValueError("rank 0 is none")
        if path == "unreadable":
            raise PermissionError(13, "Permission denied", "/adapters/unreadable/adapter_config.json")
        if path == "strange":
            raise KeyError("a bug")
        if path == "stopping":
            raise EngineStopped("the engine has stopped")
        if path == "slow":
            self.go_on.wait(10)
        return super().load_host(path, claim)


@pytest.fixture
def executor():
    return FailingLoads()


@pytest.fixture
async def client(tmp_path, executor):
    engine = Engine(EngineState.create(CoreConfig(num_pages=100)), executor)
    service = EngineService(engine, pb.EngineInfo(model="fake", protocol=PROTOCOL))
    address = f"unix:{tmp_path / 'engine.sock'}"
    server = _listen(service, address)
    loop = threading.Thread(target=engine.run, args=(service.deliver,))
    loop.start()
    client = EngineClient(address, load_seconds=30.0)
    await client.start()
    await asyncio.wait_for(client.wait_ready(), 120)
    yield client
    executor.go_on.set()
    await client.close()
    engine.stop()
    await asyncio.to_thread(loop.join)
    await asyncio.to_thread(server.stop(grace=0).wait)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("invalid", "^rank 0 is none$"),
        ("unreadable", r"^\[Errno 13\] Permission denied: '/adapters/unreadable/adapter_config.json'$"),
        ("strange", "a bug"),
    ],
)
async def test_an_adapter_that_cannot_be_read_is_refused_with_its_reason(client, path, reason):
    with pytest.raises(AdapterRejected, match=reason):
        await client.load_adapter(path)
    assert client.ready
    assert (await client.load_adapter("good")).adapter


async def test_an_adapter_that_takes_too_long_is_refused_and_may_come_later(client, executor):
    client.load_seconds = 0.5
    with pytest.raises(AdapterRejected, match="had not read it after"):
        await client.load_adapter("slow")
    assert client.ready
    client.load_seconds = 30.0
    executor.go_on.set()
    assert (await client.load_adapter("slow")).adapter


async def test_unloading_an_unknown_adapter_ends(client):
    assert await client.unload_adapter("unknown", 0.0) == 0


async def test_an_engine_that_does_not_let_go_of_an_adapter_is_unavailable(client, monkeypatch):
    monkeypatch.setattr("engine.rpc.client.UNLOAD_MARGIN_SECONDS", 0.3)
    stopped = threading.Event()
    monkeypatch.setattr(Engine, "unload_adapter", lambda *args: stopped.wait(10) or 0)
    try:
        with pytest.raises(EngineUnavailable):
            await client.unload_adapter("stuck", 0.1)
    finally:
        stopped.set()


async def test_the_integrity_check_is_made_when_asked_for(client, monkeypatch):
    monkeypatch.setattr("engine.rpc.snapshot.violations", lambda state: ["page 7 is lost"])
    assert list((await client.stats()).violations) == []
    assert list((await client.stats(check=True)).violations) == ["page 7 is lost"]


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What the engine was told to do, in order."""
    found, take = [], EngineService._take

    def listen(service, session, command):
        found.append(command.WhichOneof("command"))
        take(service, session, command)

    monkeypatch.setattr(EngineService, "_take", listen)
    return found


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_request_is_under_way_before_it_is_read_and_ends_with_its_reader(client, told):
    await client.set_lane(Lane.INTERACTIVE, LaneMode.PAUSED)
    stream = client.generate(Request("r", (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True)))
    await until(lambda: told == ["submit"])
    await stream.aclose()
    await until(lambda: told == ["submit", "abort"])
    assert [events async for events in stream] == []


async def test_a_request_that_has_ended_is_not_aborted_and_nothing_of_it_is_kept(client, told):
    for name in ("first", "second"):
        stream = client.generate(Request(name, (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True)))
        await until(lambda: not client._streams)  # its end is here, and the caller has not read it
        if name == "first":
            assert sum(len(event.tokens) for event in await anext(stream)) == 4
        await stream.aclose()
    assert await client.unload_adapter("unknown", 0.0) == 0  # long enough for an abort to be heard of
    assert told == ["submit", "submit"]


async def test_an_engine_that_stops_meanwhile_does_not_blame_the_adapter(client):
    with pytest.raises(EngineUnavailable, match="stopped"):
        await client.load_adapter("stopping")
