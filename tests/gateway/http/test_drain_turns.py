"""Bodies of refused requests are drained a little at a time."""

from __future__ import annotations

import asyncio

import pytest
from fakes import BASE
from raw_http import connect, read, request
from served import served

from gateway.http import drain_turns
from gateway.http.drain_turns import CONNECTIONS_AT_ONCE, DRAINED_BYTES, DrainTurns
from gateway.http.guard import GuardedProtocol

FOR_EVER_S = 3600.0
READ_BYTES = 256_000
CHAT = b'{"model": "%b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}' % BASE.encode()


@pytest.fixture
async def turns(monkeypatch) -> DrainTurns:
    """The event loop does not come to an end of the pause."""
    monkeypatch.setattr(drain_turns, "DRAIN_PAUSE_S", FOR_EVER_S)
    return DrainTurns()


async def test_few_connections_read_on_after_each_pause(turns):
    """Each of them has a read's bytes, as many as the kernel holds for it."""
    drained: list[int] = []

    def drain(connection: int) -> None:
        drained.append(connection)
        if not turns.has_room(READ_BYTES):
            turns.wait(lambda: drain(connection))

    for connection in range(100):
        drain(connection)
    assert drained == list(range(100)), "the bytes that were read already"
    for round_ in range(1, 6):
        turns._tick()
        assert len(drained) == 100 + round_ * CONNECTIONS_AT_ONCE
    assert len(set(drained[100:])) == 5 * CONNECTIONS_AT_ONCE, "they take turns"


async def test_a_single_connection_is_drained_without_waiting_much(turns):
    assert turns.has_room(DRAINED_BYTES // 2)
    assert not turns.has_room(DRAINED_BYTES)
    turns._tick()
    assert turns.has_room(1) and not turns._waiting


async def test_the_pause_ends(monkeypatch):
    monkeypatch.setattr(drain_turns, "DRAIN_PAUSE_S", 0.0)
    turns, on = DrainTurns(), asyncio.Event()
    turns.wait(lambda: None)
    turns.wait(on.set)
    await on.wait()


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_refused_body_is_drained_in_turns_and_its_connection_stays(tmp_path, monkeypatch, framing):
    """The peer sends all of it before it reads the response, and then another request."""
    monkeypatch.setattr(drain_turns, "DRAINED_BYTES", 1)
    waits, resumed = [], []
    wait, read_on = DrainTurns.wait, GuardedProtocol._read_on
    monkeypatch.setattr(DrainTurns, "wait", lambda turns, later: (waits.append(1), wait(turns, later)))
    monkeypatch.setattr(GuardedProtocol, "_read_on", lambda self: (resumed.append(1), read_on(self)))
    body = b"a" * 4_000_000
    sent = request(body, path="/v1/nothing")
    if framing == "chunks":
        sent = request(b"", "transfer-encoding: chunked", path="/v1/nothing") + b"%x\r\n%b\r\n0\r\n\r\n" % (
            len(body),
            body,
        )
    with served(tmp_path) as gateway, connect(gateway) as connection:
        connection.sendall(sent)
        assert read(connection).status == 404
        connection.sendall(request(CHAT))
        assert read(connection).status == 200
    assert waits and len(resumed) == len(waits)
