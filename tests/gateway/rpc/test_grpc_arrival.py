"""How messages arrive over gRPC: callers authenticate first, messages have little room and time, and none stays."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_app import GrpcApp, as_key, ask, open_grpc_app, refused, until
from grpc_health.v1 import health_pb2

from gateway.core.errors import ApiError, Fault
from gateway.pb import generation_pb2 as pb
from gateway.requests.wire_room import STRANGERS, WireRoom
from gateway.rpc import arrival
from gateway.rpc.arrival import ArrivingMessages
from gateway.rpc.calls import RpcCall
from gateway.rpc.entrance import SMALL_BYTES, STRANGER_MESSAGE_BYTES, Method
from gateway.rpc.generation import REQUESTS

GENERATE, GENERATE_STREAM = REQUESTS[:2]
LARGE = 80_000
"""Bytes of a message near the maximum of these tests."""
PADDING = b"\xfa\x7f" + b"\xc0\xb8\x02" + b"x" * 40_000
"""A field of 40,000 bytes, number 2047, that no message has."""


@pytest.fixture
async def api(tmp_path) -> AsyncIterator[GrpcApp]:
    async with open_grpc_app(tmp_path) as opened:
        yield opened
        await opened.assert_empty()
        assert opened.gateway_app.gateway.wire.total == 0


class Watched:
    """Stands for a parsed message, which knows no weak references."""

    def __init__(self, message: Any) -> None:
        self._message = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


@pytest.fixture
def alive(monkeypatch) -> Callable[[], int]:
    """Count the parsed request messages that are in memory."""
    messages: list[weakref.ref[Any]] = []
    parse = Method.parse

    def parsed(method: Method, message: bytes) -> Any:
        result = Watched(parse(method, message))
        messages.append(weakref.ref(result))
        return result

    monkeypatch.setattr(Method, "parse", parsed)
    return lambda: sum(message() is not None for message in messages)


@contextmanager
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def silent(api: GrpcApp, key: str = "acme", method: str = GENERATE) -> grpc.aio.StreamUnaryCall[Any, Any]:
    """Begin a call whose message does not come."""
    return api.channel.stream_unary(method)(metadata=as_key(key) if key else ())


async def settled() -> None:
    """Let the server take note of what its clients have begun."""
    for _ in range(20):
        await asyncio.sleep(0.005)


REFUSED = {
    "too long": ({"prompt_ids": pb.TokenIds(ids=[1] * LARGE)}, "acme", "INVALID_ARGUMENT"),
    "unknown model": ({"model": "none", "prompt": "x" * LARGE}, "acme", "NOT_FOUND"),
    "no key": ({"prompt": "x" * LARGE}, "", "UNAUTHENTICATED"),
    "unknown key": ({"prompt": "x" * LARGE}, "stranger", "UNAUTHENTICATED"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_refused_calls_leave_nothing_in_memory(api, alive, kind, method):
    fields, key, code = REFUSED[kind]
    request = pb.GenerateRequest(**{"model": "tiny"} | fields)

    async def refuse(count: int) -> None:
        for _ in range(count):
            call = getattr(api.generation, method)(request, metadata=as_key(key))
            assert (await refused(call if method == "Generate" else call.read())).code == code
        await settled()

    await refuse(2)
    with without_collections():
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        await refuse(20)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert alive() == 0
        assert after - before < 5 * LARGE, "of 20 messages"


async def test_refusals_of_grpcs_own_services_leave_nothing_in_memory(api, alive):
    request = health_pb2.HealthCheckRequest(service="x" * 4000)
    with without_collections():
        for _ in range(5):
            assert (await refused(api.health.Check(request))).code == "NOT_FOUND"
        await settled()
        assert alive() == 0


async def test_callers_authenticate_before_their_messages_are_read(api, monkeypatch):
    read = []
    monkeypatch.setattr(RpcCall, "read", lambda call: read.append(call))
    for method in (*REQUESTS, "/loralane.v1.JsonApi/Call", "/loralane.v1.Generation/Tokenize"):
        for key in ("stranger", "admin"):
            code = (await refused(silent(api, key, method))).code
            assert code == ("PERMISSION_DENIED" if key == "admin" else "UNAUTHENTICATED")
    assert (await refused(silent(api, "acme", "/loralane.v1.LimitAdmin/Get"))).code == "PERMISSION_DENIED"
    assert read == []
    records = api.gateway_app.watcher.records
    assert [(record.outcome.status, record.caller.tenant) for record in records[:2]] == [(401, ""), (403, "admin")]
    assert len(records) == 2 * (len(REQUESTS) + 1), "those of requests"


@pytest.mark.parametrize("key", ["acme", ""])
async def test_a_message_that_does_not_come_is_not_waited_for(api, monkeypatch, key):
    monkeypatch.setattr(arrival, "STRANGER_SECONDS" if key == "" else "ARRIVAL_SECONDS", 0.1)
    monkeypatch.setattr(arrival, "LOOK_SECONDS", 0.05)
    refusal = await refused(silent(api, key, GENERATE if key else "/grpc.health.v1.Health/Check"))
    assert refusal.code == "DEADLINE_EXCEEDED"
    assert refusal.details["RequestInfo"].request_id
    assert [record.caller.tenant for record in api.gateway_app.watcher.records] == ([key] if key else [])


async def test_a_call_without_a_message_is_refused(api):
    call = silent(api)
    await call.done_writing()
    refusal = await refused(call)
    assert (refusal.code, refusal.message) == ("INVALID_ARGUMENT", "the call has no request message")


async def test_a_tenant_that_sends_slowly_delays_itself_alone(api, monkeypatch):
    monkeypatch.setattr(arrival, "TENANT_MESSAGES", 2)
    monkeypatch.setattr(arrival, "ALL_MESSAGES", 2)
    slow = [silent(api) for _ in range(2)]
    await settled()
    waiting = asyncio.ensure_future(api.generation.Generate(ask(), metadata=as_key()))
    for _ in range(3):
        await api.generation.Generate(ask(), metadata=as_key("initech"))
    assert not waiting.done()
    slow[0].cancel()
    assert (await waiting).choices[0].text == "Hello"
    slow[1].cancel()


async def test_calls_that_wait_to_send_are_bounded(api, monkeypatch):
    monkeypatch.setattr(arrival, "TENANT_MESSAGES", 1)
    monkeypatch.setattr(arrival, "MOST_WAITING", 2)
    slow = [silent(api) for _ in range(3)]
    await settled()
    refusal = await refused(api.generation.Generate(ask(), metadata=as_key()))
    assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "RATE_LIMIT_EXCEEDED")
    slow[1].cancel()
    await settled()
    waiting = asyncio.ensure_future(api.generation.Generate(ask(), metadata=as_key()))
    await settled()
    for call in (slow[0], slow[2]):
        call.cancel()
    assert (await waiting).choices[0].text == "Hello"


async def test_strangers_that_send_slowly_give_way(api, monkeypatch):
    monkeypatch.setattr(arrival, "STRANGER_MESSAGES", 2)
    slow = []
    for _ in range(2):
        slow.append(silent(api, "", "/grpc.health.v1.Health/Check"))
        await settled()
    for _ in range(2):
        await api.health.Check(health_pb2.HealthCheckRequest())
    assert (await refused(slow[0])).code == "UNAVAILABLE"
    slow[1].cancel()


async def test_messages_of_strangers_are_small(api):
    request = health_pb2.HealthCheckRequest(service="x" * STRANGER_MESSAGE_BYTES)
    assert (await refused(api.health.Check(request))).code == "INVALID_ARGUMENT"
    assert (await refused(api.health.Watch(request).read())).code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("method", [GENERATE, GENERATE_STREAM, "/loralane.v1.JsonApi/Stream"])
async def test_a_message_is_let_go_when_it_is_understood(api, alive, method):
    """A message can have much that no limit of tokens counts, and its answer may take minutes."""
    engine = api.gateway_app.engine
    engine.go_on = asyncio.Event()
    if method.endswith("JsonApi/Stream"):
        body = b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":5,"stream":true}'
        request = b"\x12" + bytes([len(body)]) + body
    else:
        request = ask().SerializeToString()
    with without_collections():
        call = api.channel.unary_stream(method)(request + PADDING, metadata=as_key())
        await until(lambda: bool(api.gateway_app.gateway.live) and bool(engine.requests))
        assert alive() == 0
        assert api.gateway_app.gateway.wire.total == 0
        engine.go_on.set()
        assert [chunk async for chunk in call]


async def test_messages_count_until_they_are_understood(api, monkeypatch):
    """A message that waits for its tenant's turn counts, for example."""
    gateway = api.gateway_app.gateway
    gateway.wire = WireRoom(tenant_bytes=LARGE)
    turn = asyncio.Event()
    monkeypatch.setattr(gateway.turns, "take", lambda tenant: turn.wait())
    request = ask(prompt="x" * (LARGE // 2 + 1000))
    first = asyncio.ensure_future(refused(api.generation.Generate(request, metadata=as_key())))
    await until(lambda: gateway.wire.total > LARGE // 2)
    refusal = await refused(api.generation.Generate(request, metadata=as_key()))
    assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "RATE_LIMIT_EXCEEDED")
    turn.set()
    assert (await first).code == "INVALID_ARGUMENT"
    await until(lambda: gateway.wire.total == 0)


async def test_answers_count_until_they_are_received(api, monkeypatch):
    counted = []
    wire = api.gateway_app.gateway.wire
    count = WireRoom.count
    monkeypatch.setattr(WireRoom, "count", lambda room, name, more: (counted.append(more), count(room, name, more)))
    prompt = "x" * 2 * SMALL_BYTES
    await api.generation.Tokenize(pb.TokenizeRequest(model="tiny", prompt=prompt), metadata=as_key())
    await until(lambda: wire.total == 0)
    message, answer, let_go = filter(None, counted)
    assert min(message, answer) > len(prompt) and let_go == -message - answer


async def test_turns_to_be_read_go_round(monkeypatch):
    monkeypatch.setattr(arrival, "ALL_MESSAGES", 3)
    messages, done, order = ArrivingMessages(), asyncio.Event(), []

    async def read(owner: str) -> None:
        async def receive() -> None:
            order.append(owner)
            if len(order) <= 3:
                await done.wait()

        await messages.read(owner, receive)

    calls = [asyncio.create_task(read(owner)) for owner in "aabaaabbc"]
    await settled()
    assert order == ["a", "a", "b", "c"], "c has its one beyond the bound"
    done.set()
    await asyncio.gather(*calls)
    assert order[4:] == ["a", "b", "a", "b", "a"]
    assert not messages._reading and not messages._waiting and messages._total == 0


async def test_a_stranger_that_has_given_way_is_told_so(monkeypatch):
    monkeypatch.setattr(arrival, "STRANGER_MESSAGES", 1)
    messages = ArrivingMessages()
    first = asyncio.create_task(messages.read(STRANGERS, asyncio.Event().wait))
    await settled()
    second = asyncio.create_task(messages.read(STRANGERS, asyncio.Event().wait))
    with pytest.raises(ApiError) as caught:
        await first
    assert caught.value.fault is Fault.OVERLOADED
    second.cancel()
    await asyncio.wait([second])
    assert not messages._reading
