"""Connections between gateways and engines over TCP: who may connect, and what both need for it."""

import asyncio
import socket
import threading

import pytest

from engine.core.config import CoreConfig
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.executor.fake import FakeExecutor
from engine.pb import engine_pb2 as pb
from engine.rpc.client import EngineClient
from engine.rpc.service import EngineService
from engine.rpc.target import EngineTls
from engine.rpc.wire import PROTOCOL
from engine.serve.server import _listen
from tests.gateway.certificates import Authority


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def files(authority, name, trusted=None):
    issued = authority.issue(name)
    return EngineTls((trusted or authority).file, issued.cert, issued.key)


@pytest.fixture
async def secure(tmp_path):
    """Yield (address, authority) of an engine that serves gateways with a certificate of the authority."""
    authority = Authority.at(tmp_path / "ours")
    engine = Engine(EngineState.create(CoreConfig(num_pages=100)), FakeExecutor())
    service = EngineService(engine, pb.EngineInfo(model="fake", protocol=PROTOCOL))
    address = f"127.0.0.1:{free_port()}"
    server = _listen(service, address, files(authority, "engine"))
    loop = threading.Thread(target=engine.run, args=(service.deliver,))
    loop.start()
    yield address, authority
    engine.stop()
    await asyncio.to_thread(loop.join)
    await asyncio.to_thread(server.stop(grace=0).wait)


async def connects(address, tls, seconds=2):
    client = EngineClient(address, tls=tls)
    await client.start()
    try:
        await asyncio.wait_for(client.wait_ready(), seconds)
    except TimeoutError:
        return False
    finally:
        await client.close()
    return True


async def test_gateways_with_a_certificate_of_the_authority_connect(secure):
    address, authority = secure
    for name in ("gateway-1", "gateway-2"):
        assert await connects(address, files(authority, name), 60)


@pytest.mark.slow
async def test_others_do_not(secure, tmp_path):
    address, authority = secure
    stranger = Authority.at(tmp_path / "theirs")
    others = {
        "without a certificate": None,
        "each side distrusts the other": files(stranger, "stranger"),
        "the engine distrusts it": files(stranger, "disguised", trusted=authority),
        "it distrusts the engine": files(authority, "wary", trusted=stranger),
    }
    found = await asyncio.gather(*(connects(address, tls) for tls in others.values()))
    assert dict(zip(others, found, strict=True)) == dict.fromkeys(others, False)


@pytest.mark.parametrize("missing", ["ca", "certificate", "key"])
def test_unusable_files_are_named(tmp_path, missing):
    tls = files(Authority.at(tmp_path), "gateway")
    path = getattr(tls, missing)
    path.unlink()
    with pytest.raises(ValueError, match=path.name):
        EngineClient("127.0.0.1:1", tls=tls)
