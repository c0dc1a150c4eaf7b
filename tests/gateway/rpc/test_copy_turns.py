"""Long messages that have arrived over gRPC are copied a few at a time."""

from __future__ import annotations

import asyncio

import pytest

from gateway.rpc import copy_turns
from gateway.rpc.copy_turns import COPIED_BYTES, CopyTurns

FOR_EVER_S = 3600.0


class Messages:
    """Messages that gRPC holds, which it copies when the coroutines that read them go on."""

    def __init__(self) -> None:
        self.whole = asyncio.get_running_loop().create_future()
        """Done when all of them have arrived."""
        self.copied: list[str] = []
        self.turns = CopyTurns()

    def read(self, caller: str, num_bytes: int) -> asyncio.Task[bytes]:
        return asyncio.create_task(self.turns.read(caller, self._reading(caller, num_bytes)))

    async def _reading(self, caller: str, num_bytes: int) -> bytes:
        whole = asyncio.get_running_loop().create_future()
        self.whole.add_done_callback(lambda _: whole.done() or whole.set_result(None))
        await whole
        self.copied.append(caller)
        return bytes(num_bytes)

    async def arrive(self) -> None:
        await _iterations()
        self.whole.set_result(None)
        await _iterations()


@pytest.fixture
async def messages(monkeypatch) -> Messages:
    """The event loop does not come to an end of the pause between two copies."""
    monkeypatch.setattr(copy_turns, "COPY_PAUSE_S", FOR_EVER_S)
    return Messages()


async def test_one_long_message_of_a_caller_is_copied_at_a_time(messages):
    calls = [messages.read("acme", COPIED_BYTES) for _ in range(16)]
    await messages.arrive()
    assert messages.copied == ["acme"], "the others would hold the event loop together"
    for number in range(2, 17):
        messages.turns._tick()
        assert len(messages.copied) == number
    assert {len(message) for message in await asyncio.gather(*calls)} == {COPIED_BYTES}
    assert not messages.turns._waiting


async def test_short_messages_are_copied_at_once(messages):
    calls = [messages.read("acme", 1000) for _ in range(200)]
    await messages.arrive()
    assert len(messages.copied) == 200
    await asyncio.gather(*calls)
    assert messages.turns._tick_handle is None, "they need no timer"


async def test_another_callers_message_waits_for_none(messages):
    calls = [messages.read("acme", COPIED_BYTES) for _ in range(3)]
    calls += [messages.read("initech", COPIED_BYTES)]
    await messages.arrive()
    assert messages.copied == ["acme", "initech"]
    await _drained(messages, calls)


async def test_a_short_message_waits_behind_long_ones_of_its_caller(messages):
    calls = [messages.read("acme", COPIED_BYTES) for _ in range(2)] + [messages.read("acme", 1)]
    await messages.arrive()
    assert len(messages.copied) == 1 and not calls[2].done()
    await _drained(messages, calls)
    assert [len(call.result()) for call in calls] == [COPIED_BYTES, COPIED_BYTES, 1]


async def test_the_message_of_a_caller_that_has_left_is_copied_in_its_turn(messages):
    """gRPC frees a message only when it is copied."""
    first, left = (messages.read("acme", COPIED_BYTES) for _ in range(2))
    await messages.arrive()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert len(messages.copied) == 1
    messages.turns._tick()
    assert len(messages.copied) == 2
    await first


async def test_a_message_that_is_whole_as_its_caller_leaves_is_copied(messages):
    call = messages.read("acme", 1)
    await _iterations()
    messages.whole.set_result(None)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    messages.turns._tick()
    assert messages.copied == ["acme"]


async def test_a_message_that_has_not_arrived_is_not_waited_for(messages):
    call = messages.read("acme", COPIED_BYTES)
    await _iterations()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await messages.arrive()
    assert messages.copied == []


@pytest.mark.parametrize("waits", [False, True])
async def test_what_the_reader_raises_is_raised(messages, waits):
    async def fail() -> bytes:
        await asyncio.shield(messages.whole)
        raise ValueError("broken off")

    calls = [messages.read("acme", COPIED_BYTES)] if waits else []
    await _iterations()
    failing = asyncio.create_task(messages.turns.read("acme", fail()))
    await messages.arrive()
    await _drained(messages, calls)
    with pytest.raises(ValueError, match="broken off"):
        await failing


async def test_a_reader_that_fails_before_its_message_is_whole():
    turns, loop = CopyTurns(), asyncio.get_running_loop()
    broken = loop.create_future()
    broken.set_exception(ConnectionError("broken off"))

    async def wait_for(future: asyncio.Future[None]) -> None:
        await future

    with pytest.raises(ConnectionError):
        await turns.read("acme", wait_for(broken))


async def test_the_pause_ends(monkeypatch):
    monkeypatch.setattr(copy_turns, "COPY_PAUSE_S", 0.0)
    messages = Messages()
    calls = [messages.read("acme", COPIED_BYTES) for _ in range(5)]
    await messages.arrive()
    await asyncio.gather(*calls)


async def _iterations() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def _drained(messages: Messages, calls: list[asyncio.Task[bytes]]) -> None:
    while messages.turns._waiting:
        messages.turns._tick()
    await asyncio.gather(*calls)
