"""The client and an engine's service over a real socket, in one process: what goes wrong, and who is to blame."""

import asyncio
import threading

import pytest

from engine.client import AdapterRejected, EngineClient, EngineUnavailable
from engine.core.config import CoreConfig
from engine.core.state import EngineState
from engine.engine import Engine
from engine.executor.fake import FakeExecutor
from engine.pb import engine_pb2 as pb
from engine.server import _listen
from engine.service import EngineService


class Shelf(FakeExecutor):
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
        if path == "slow":
            self.go_on.wait(10)
        return super().load_host(path, claim)


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
async def client(tmp_path, shelf):
    engine = Engine(EngineState.create(CoreConfig(num_pages=100)), shelf)
    service = EngineService(engine, pb.EngineInfo(model="fake"))
    address = f"unix:{tmp_path / 'engine.sock'}"
    server = _listen(service, address)
    loop = threading.Thread(target=engine.run, args=(service.deliver,))
    loop.start()
    client = EngineClient(address, load_seconds=1.0)
    await client.start()
    await asyncio.wait_for(client.wait_ready(), 120)
    yield client
    shelf.go_on.set()
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


async def test_an_adapter_that_takes_too_long_is_refused_and_may_come_later(client, shelf):
    with pytest.raises(AdapterRejected, match="had not read it after"):
        await client.load_adapter("slow")
    assert client.ready
    shelf.go_on.set()
    assert (await client.load_adapter("slow")).adapter


async def test_unloading_an_adapter_that_nobody_has_ends(client):
    assert await client.unload_adapter("nobody", 0.0) == 0


async def test_an_engine_that_does_not_let_go_of_an_adapter_is_unavailable(client, monkeypatch):
    monkeypatch.setattr("engine.client.UNLOAD_MARGIN_SECONDS", 0.3)
    stopped = threading.Event()
    monkeypatch.setattr(Engine, "unload_adapter", lambda *args: stopped.wait(10) or 0)
    try:
        with pytest.raises(EngineUnavailable):
            await client.unload_adapter("stuck", 0.1)
    finally:
        stopped.set()


async def test_the_integrity_check_is_made_when_asked_for(client, monkeypatch):
    monkeypatch.setattr("engine.snapshot.violations", lambda state: ["page 7 is lost"])
    assert list((await client.stats()).violations) == []
    assert list((await client.stats(check=True)).violations) == ["page 7 is lost"]
