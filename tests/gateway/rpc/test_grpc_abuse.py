"""What strangers and tenants send over gRPC to hurt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest
from fakes import BASE
from grpc_app import MAX_MESSAGE_BYTES, GrpcApp, as_key, ask, open_grpc_app, refused, until

from gateway.core.errors import ApiError
from gateway.pb import batches_pb2, limits_pb2, tenants_pb2
from gateway.pb import generation_pb2 as pb
from gateway.pb.limits_pb2_grpc import LimitAdminStub
from gateway.rpc.calls import RpcCall
from gateway.rpc.generation import SERVICE as GENERATION
from gateway.rpc.message_bounds import FEW_BYTES, MOST_FIELDS, MOST_KEY_BYTES, MOST_NUMBERS, PIECE_BYTES, check_message


@pytest.fixture
async def grpc_app(tmp_path) -> AsyncIterator[GrpcApp]:
    async with open_grpc_app(tmp_path) as grpc_app:
        yield grpc_app
        await grpc_app.assert_empty()


WRONG = {
    "temperature": math.nan,
    "top_p": math.inf,
    "min_p": -math.inf,
    "presence_penalty": math.nan,
    "max_tokens": 2**31,
    "top_k": -2,
    "stop_token_ids": [5] * 1025,
    "stop": ["x" * 20_000],
    "logit_bias": dict.fromkeys(range(-1025, 0), 1.0),
    "logprobs": 21,
}


@pytest.mark.parametrize("name", WRONG)
async def test_values_out_of_all_proportion(grpc_app, name):
    try:
        request = ask(sampling={"max_tokens": 5, name: WRONG[name]})
    except (ValueError, TypeError):
        return  # the message has no room for it
    refusal = await refused(grpc_app.generation.Generate(request, metadata=as_key()))
    assert (refusal.code, grpc_app.gateway_app.engine.requests) == ("INVALID_ARGUMENT", [])
    assert refusal.details["RequestInfo"].request_id


@pytest.mark.parametrize(
    "fields",
    [
        {"chat": pb.Chat(messages=[pb.ChatMessage(role="user")] * (MOST_FIELDS // 2))},
        {"chat": pb.Chat(messages=[pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="a")] * MOST_FIELDS)])},
        {"chat": pb.Chat(messages=[pb.ChatMessage(role="user")], tools=[pb.Tool(name="a")] * MOST_FIELDS)},
        {"prompt_ids": pb.TokenIds(ids=[5] * (MOST_NUMBERS + 1))},
        {"prompt": "a", "sampling": pb.SamplingParams(logit_bias=dict.fromkeys(range(MOST_FIELDS), 1.0))},
    ],
    ids=["messages", "calls", "tools", "ids", "biases"],
)
def test_messages_of_too_many_values(fields):
    data = pb.GenerateRequest(model=BASE, **fields).SerializeToString()
    with pytest.raises(ApiError, match="a message may have at most"):
        check_message(data, pb.GenerateRequest.DESCRIPTOR)
    for cut in (1, 2, len(data) // 2):
        with suppress(ApiError):  # what is cut off is left to the parser
            check_message(data[:-cut], pb.GenerateRequest.DESCRIPTOR)


class Watched(bytes):
    """Notes the lengths of its parts that are looked at."""

    def __new__(cls, data: bytes) -> Watched:
        watched = super().__new__(cls, data)
        watched.parts = []
        return watched

    def __getitem__(self, place):
        part = super().__getitem__(place)
        if isinstance(place, slice):
            self.parts.append(len(part))
        return part


@pytest.mark.parametrize("number", [5, 300], ids=["of a byte", "of two bytes"])
def test_a_list_of_too_many_numbers_is_not_counted_to_its_end(number):
    """To count the numbers of eight mebibytes at once kept Python's lock from the event loop for 10 ms."""
    data = Watched(pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=[number] * 2_000_000)).SerializeToString())
    with pytest.raises(ApiError, match=f"at most {MOST_NUMBERS} numbers"):
        check_message(data, pb.GenerateRequest.DESCRIPTOR)
    assert max(data.parts) == PIECE_BYTES
    assert sum(data.parts) < 2 * MOST_NUMBERS + 2 * PIECE_BYTES < len(data)


@pytest.mark.parametrize("outer", [20, 2**62], ids=["a list", "a list in a message"])
def test_a_list_that_says_it_has_more_bytes_than_there_are_is_read_to_the_end_of_the_data(outer):
    """Its end was 2**46 pieces away, and one such message kept the thread that parses long ones for ever."""
    ids = b"\x0a" + varint(2**62) + b"\x05" * FEW_BYTES
    data = Watched(b"\x22" + varint(outer) + ids)
    kind = pb.GenerateRequest.DESCRIPTOR
    assert kind.fields_by_name["prompt_ids"].number == 0x22 >> 3
    assert pb.TokenIds.DESCRIPTOR.fields_by_name["ids"].number == 1
    check_message(data, kind)  # protobuf refuses it, as it does everything that is cut off
    assert sum(data.parts) == FEW_BYTES


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


@pytest.mark.parametrize("count", [MOST_NUMBERS, MOST_NUMBERS - 1])
def test_a_list_of_as_many_numbers_as_allowed(count):
    data = pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=[300] * count)).SerializeToString()
    check_message(data, pb.GenerateRequest.DESCRIPTOR)


def test_groups_are_refused():
    """A parser keeps those that it does not know, which took 30 ms for a million of them."""
    with pytest.raises(ApiError, match="groups"):
        check_message(b"\xfb\x01\xfc\x01" * 20_000, pb.GenerateRequest.DESCRIPTOR)


@pytest.mark.parametrize(
    "message",
    [
        batches_pb2.CreateBatchRequest(metadata={"k" * 60_000: ""}),
        tenants_pb2.TenantFields(classes={"k" * 60_000: tenants_pb2.RequestClass()}),
    ],
    ids=["texts", "messages"],
)
def test_keys_of_maps_are_bounded(message):
    """Each look at a map encodes and hashes its key: one of seven megabytes held up the event loop."""
    data = message.SerializeToString()
    with pytest.raises(ApiError, match=f"key of a map may have at most {MOST_KEY_BYTES} bytes"):
        check_message(data, message.DESCRIPTOR)
    long_value = batches_pb2.CreateBatchRequest(metadata={"k": "v" * 60_000})
    check_message(long_value.SerializeToString(), long_value.DESCRIPTOR)


async def test_a_message_of_too_many_values_is_refused_before_it_is_parsed(grpc_app, monkeypatch):
    """To parse it would take memory and hold up the event loop."""
    monkeypatch.setattr("gateway.rpc.message_bounds.FEW_BYTES", 0)
    monkeypatch.setattr("gateway.rpc.message_bounds.MOST_FIELDS", 6)
    messages = [pb.ChatMessage(role="user", content="hi")] * 3
    asked = pb.GenerateRequest(model=BASE, chat=pb.Chat(messages=messages))
    refusal = await refused(grpc_app.generation.Generate(asked, metadata=as_key()))
    assert (refusal.code, "at most 6 fields" in refusal.message) == ("INVALID_ARGUMENT", True)
    assert not grpc_app.gateway_app.engine.requests


def test_the_longest_sessions_are_not_too_large():
    call = pb.ToolCall(id="call_12345678", name="look", arguments="{}" * 50)
    turn = [pb.ChatMessage(role="assistant", tool_calls=[call]), pb.ChatMessage(role="tool", content="x" * 200)]
    data = pb.GenerateRequest(model=BASE, chat=pb.Chat(messages=turn * 1500)).SerializeToString()
    check_message(data, pb.GenerateRequest.DESCRIPTOR)


async def test_weights_and_deadlines_that_are_no_numbers(grpc_app):
    for seconds in (math.nan, math.inf, -1.0):
        stub = LimitAdminStub(grpc_app.channel)
        request = limits_pb2.WatchLimitsRequest(tenant="acme", interval_seconds=seconds)
        assert (await refused(stub.Watch(request, metadata=as_key("admin")).read())).code == "INVALID_ARGUMENT"


async def test_limits_that_do_not_exist(grpc_app):
    stub, scope = LimitAdminStub(grpc_app.channel), limits_pb2.LimitScope(tenant="acme")
    for more in ({"lift": ["fame"]}, {"limits": limits_pb2.Limits(when_redis_is_away={"fame": "open"})}):
        request = limits_pb2.SetLimitsRequest(scope=scope, **more)
        refusal = await refused(stub.Set(request, metadata=as_key("admin")))
        assert refusal.code == "INVALID_ARGUMENT"
        assert "fame" in refusal.message


async def test_messages_that_are_too_large_never_arrive(grpc_app):
    refusal = await refused(grpc_app.generation.Generate(ask(prompt="x" * MAX_MESSAGE_BYTES), metadata=as_key()))
    assert refusal.code == "RESOURCE_EXHAUSTED"
    assert grpc_app.gateway_app.watcher.records == []


async def test_metadata_that_are_too_large_never_arrive(grpc_app):
    flood = [(f"x-{number}", "a" * 1000) for number in range(200)]
    with pytest.raises(grpc.aio.AioRpcError):
        await grpc_app.generation.Generate(ask(), metadata=(*as_key(), *flood))
    assert grpc_app.gateway_app.watcher.records == []
    await grpc_app.generation.Generate(ask(), metadata=as_key())


@pytest.mark.parametrize(
    "key", ["", "Bearer", "Bearer ", "Basic sk-acme", "bearer sk-acme sk-acme", "Bearer " + "x" * 5000]
)
async def test_keys_that_are_none(grpc_app, key):
    refusal = await refused(grpc_app.generation.Generate(ask(), metadata=(("authorization", key),)))
    assert refusal.code == "UNAUTHENTICATED"


async def test_noise_on_the_port_leaves_it_working(grpc_app):
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 10_000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000):
        reader, writer = await asyncio.open_connection("127.0.0.1", grpc_app.port)
        writer.write(noise)
        await writer.drain()
        async with asyncio.timeout(30):
            while await reader.read(65536):
                pass
        writer.close()
    await grpc_app.generation.Generate(ask(), metadata=as_key())


@pytest.mark.slow
async def test_who_never_reads_is_cut_off_and_settled(grpc_app, monkeypatch):
    monkeypatch.setattr(RpcCall, "write_seconds", 0.3)
    gateway_app = grpc_app.gateway_app
    gateway_app.engine.info.max_model_len = 1_000_000
    gateway_app.engine.reply = lambda sent: "x" * 20_000
    wanted = ask(BASE, {"max_tokens": 20_000, "logprobs": 20})
    call = grpc_app.generation.GenerateStream(wanted, metadata=as_key())
    await call.initial_metadata()
    await until(lambda: len(gateway_app.watcher.records) == 1)
    [record] = gateway_app.watcher.records
    assert (record.outcome.finish, record.outcome.status) == ("cancelled", 499)
    assert 0 < record.work.completion_tokens < 20_000
    await grpc_app.assert_empty()
    assert list(gateway_app.limiter.ends.values()) == [[record.work.prompt_tokens + record.work.completion_tokens]]
    call.cancel()


RAW_METHODS = (
    *(f"loralane.v1.Generation/{method.name}" for method in GENERATION.methods),
    "loralane.v1.JsonApi/Call",
    "loralane.v1.JsonApi/Stream",
    "loralane.v1.LimitAdmin/Watch",
    "loralane.v1.LaneAdmin/List",
    "loralane.v1.EngineAdmin/List",
    "grpc.health.v1.Health/Check",
)


@pytest.mark.parametrize("method", RAW_METHODS)
async def test_bytes_that_are_no_message_are_an_invalid_argument(grpc_app, method):
    key = "admin" if "Admin" in method else "acme"
    call = grpc_app.channel.unary_stream(f"/{method}")(b"\xff\xff\xff\xff\x0f", metadata=as_key(key))
    refusal = await refused(call.read())
    assert refusal.code == "INVALID_ARGUMENT" and refusal.details["RequestInfo"].request_id
    assert "Exception" not in refusal.message and "DecodeError" not in refusal.message
    assert grpc_app.gateway_app.engine.requests == []


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_a_malformed_message_of_a_stream_is_an_invalid_argument(grpc_app, version):
    method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    call = grpc_app.channel.stream_stream(method)(iter([b"\xff\xff\xff\xff\x0f"]))
    assert (await refused(call.read())).code == "INVALID_ARGUMENT"
