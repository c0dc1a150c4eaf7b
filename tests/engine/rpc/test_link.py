"""How a gateway connects to an engine that it cannot reach at first, or whose certificates are renewed."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import threading
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
from structlog.testing import capture_logs

from engine.core.config import CoreConfig
from engine.core.messages.requests import Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.executor.fake import FakeExecutor
from engine.pb import engine_pb2 as pb
from engine.rpc.client import EngineClient
from engine.rpc.link import EngineLink
from engine.rpc.outage import Unreachable
from engine.rpc.service import EngineService
from engine.rpc.target import EngineTls
from engine.rpc.wire import PROTOCOL
from engine.serve.server import _listen
from tests.engine.rpc.test_transport import files, free_port
from tests.gateway.certificates import Authority

pytestmark = pytest.mark.slow

REFUSED = "nothing listens there"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Let gateways retry at once."""
    for name in ("UNREACHABLE_SECONDS", "REFUSED_SECONDS"):
        monkeypatch.setattr(f"engine.rpc.link.{name}", 0.01)


@asynccontextmanager
async def engine_at(address, tls=None):
    """Run an engine until the block ends."""
    engine = Engine(EngineState.create(CoreConfig(num_pages=100)), FakeExecutor())
    service = EngineService(engine, pb.EngineInfo(model="fake", protocol=PROTOCOL))
    server = _listen(service, address, tls)
    loop = threading.Thread(target=engine.run, args=(service.deliver,))
    loop.start()
    try:
        yield
    finally:
        engine.stop()
        await asyncio.to_thread(loop.join)
        await asyncio.to_thread(server.stop(grace=0).wait)


@asynccontextmanager
async def client_of(address, tls=None, **options):
    client = EngineClient(address, tls=tls, **options)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def attempts(monkeypatch):
    """The reasons of all failed attempts, in order."""
    from engine.rpc.outage import OutageLog

    found, note = [], OutageLog.note
    monkeypatch.setattr(OutageLog, "note", lambda log, reason: (found.append(reason), note(log, reason))[1])
    return found


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_an_outage_is_logged_once_and_its_end_once(attempts):
    address = f"127.0.0.1:{free_port()}"
    with capture_logs() as logs:
        async with client_of(address) as client:
            for _ in range(2):
                seen = len(attempts)
                await until(lambda seen=seen: len(attempts) > seen + 3)
                async with engine_at(address):
                    await asyncio.wait_for(client.wait_ready(), 60)
                await until(lambda: not client.ready)
    told = [line for line in logs if line["event"] != "engine_lost"]
    assert [line["event"] for line in told[:4]] == ["engine_unreachable", "engine_reached"] * 2
    assert {line["address"] for line in told} == {address}
    assert "Connection refused" in told[0]["reason"]
    assert REFUSED in told[0]["hint"]


def expired(authority):
    issued = authority.ca.issue_cert("127.0.0.1", not_after=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
    certificate, key = authority.folder / "expired.pem", authority.folder / "expired.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    return EngineTls(authority.file, certificate, key)


def elsewhere(authority):
    issued = authority.issue("elsewhere", "gpu1.internal")
    return EngineTls(authority.file, issued.cert, issued.key)


def fine(authority):
    return files(authority, "engine")


@pytest.mark.parametrize(
    ("engine_files", "gateway_files", "hint"),
    [
        (elsewhere, lambda ours, theirs: files(ours, "gateway"), "not for this name or IP address"),
        (fine, lambda ours, theirs: files(ours, "gateway", trusted=theirs), "of none of the authorities"),
        (fine, lambda ours, theirs: files(theirs, "gateway", trusted=ours), "does not accept this gateway's"),
        (fine, lambda ours, theirs: expired(ours), "does not accept this gateway's"),
        (expired, lambda ours, theirs: files(ours, "gateway"), "has expired"),
        (fine, lambda ours, theirs: None, "this gateway needs it, too"),
        (lambda ours: None, lambda ours, theirs: files(ours, "gateway"), "without engine.tls"),
    ],
)
async def test_the_log_says_which_file_or_name_is_wrong(tmp_path, attempts, engine_files, gateway_files, hint):
    ours, theirs, address = (
        Authority.at(tmp_path / "ours"),
        Authority.at(tmp_path / "theirs"),
        f"127.0.0.1:{free_port()}",
    )
    with capture_logs() as logs:
        async with engine_at(address, engine_files(ours)), client_of(address, gateway_files(ours, theirs)):
            await until(lambda: len(attempts) > 3)
    (line,) = [line for line in logs if line["event"] == "engine_unreachable"]
    assert hint in line["hint"]


async def test_a_gateway_connects_with_certificates_that_were_renewed_on_disk(tmp_path):
    old, new, address = Authority.at(tmp_path / "old"), Authority.at(tmp_path / "new"), f"127.0.0.1:{free_port()}"
    shown = files(old, "gateway")
    async with client_of(address, shown) as client:
        async with engine_at(address, files(old, "engine")):
            await asyncio.wait_for(client.wait_ready(), 60)
        await until(lambda: not client.ready)
        renewed = files(new, "gateway")
        for name in ("ca", "certificate", "key"):
            shutil.copy(getattr(renewed, name), getattr(shown, name))
        async with engine_at(address, files(new, "engine")):
            await asyncio.wait_for(client.wait_ready(), 60)


async def test_unusable_new_files_leave_the_old_certificate_in_force(tmp_path):
    authority, address = Authority.at(tmp_path), f"127.0.0.1:{free_port()}"
    shown = files(authority, "gateway")
    with capture_logs() as logs:
        async with engine_at(address, files(authority, "engine")), client_of(address, shown) as client:
            await asyncio.wait_for(client.wait_ready(), 60)
            shown.key.write_text("half a key")
            client.disconnect()
            await until(lambda: not client.ready)
            await asyncio.wait_for(client.wait_ready(), 60)
    (line,) = [line for line in logs if line["event"] == "certificate_not_renewed"]
    assert shown.key.name in line["reason"]


async def tokens_of(client, name):
    stream = client.generate(Request(name, (1, 2, 3), SamplingParams(max_tokens=20, ignore_eos=True)))
    async with aclosing(stream):
        return [token async for events in stream for event in events for token in event.tokens]


async def test_forty_gateways_get_answers_from_one_engine(tmp_path):
    address, heard = f"unix:{tmp_path / 'engine.sock'}", set()
    async with engine_at(address), AsyncExitStack() as stack:
        connections = (client_of(address, on_news=lambda _, number=number: heard.add(number)) for number in range(40))
        clients = [await stack.enter_async_context(connection) for connection in connections]
        async with asyncio.timeout(60):
            await asyncio.gather(*(client.wait_ready() for client in clients))
            answers = await asyncio.gather(*(tokens_of(client, f"r{i}") for i, client in enumerate(clients)))
            stats = await asyncio.gather(*(client.stats() for client in clients))
        await until(lambda: len(heard) == 40)
    assert [len(answer) for answer in answers] == [20] * 40
    assert len(stats) == 40


async def test_an_engine_refuses_more_gateways_than_it_can_serve_and_takes_the_next_when_one_leaves(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("engine.rpc.service.MAX_GATEWAYS", 1)
    address = f"unix:{tmp_path / 'engine.sock'}"
    with capture_logs() as logs:
        async with engine_at(address):
            async with client_of(address) as first:
                await asyncio.wait_for(first.wait_ready(), 60)
                await tokens_of(first, "q")  # otherwise the engine may not know of its session yet
                second = EngineClient(address)
                await second.start()
                await until(lambda: second.mismatch)
                assert "gateways already" in second.mismatch
                assert not second.ready
                assert len(await tokens_of(first, "r")) == 20
            await asyncio.wait_for(second.wait_ready(), 60)
            assert not second.mismatch
            await second.close()
    assert [line["event"] for line in logs].count("engine_refused") == 1


async def test_a_gateway_stops_connecting_also_if_an_attempt_fails_as_it_is_cancelled(monkeypatch):
    waiting = asyncio.Event()

    async def describe(link, stub):
        waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # gRPC does so if the call has failed at the same time
            raise Unreachable("connection refused") from None

    monkeypatch.setattr(EngineLink, "_describe", describe)
    async with client_of("unix:/nowhere/at/all") as client:
        await asyncio.wait_for(waiting.wait(), 60)
        await asyncio.wait_for(client.close(), 60)
