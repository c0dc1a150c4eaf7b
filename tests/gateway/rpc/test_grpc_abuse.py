"""What strangers and tenants send over gRPC to hurt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import grpc
import pytest
from fakes import BASE
from grpc_house import MAX_MESSAGE_BYTES, GrpcHouse, as_key, ask, open_grpc_house, refused, until

from gateway.pb import limits_pb2
from gateway.pb.limits_pb2_grpc import LimitAdminStub
from gateway.rpc.calls import Call


@pytest.fixture
async def place(tmp_path) -> AsyncIterator[GrpcHouse]:
    async with open_grpc_house(tmp_path) as grpc_house:
        yield grpc_house
        await grpc_house.assert_empty()


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
async def test_values_out_of_all_proportion(place, name):
    try:
        request = ask(sampling={"max_tokens": 5, name: WRONG[name]})
    except (ValueError, TypeError):
        return  # the message has no room for it
    refusal = await refused(place.generation.Generate(request, metadata=as_key()))
    assert (refusal.code, place.house.engine.requests) == ("INVALID_ARGUMENT", [])
    assert refusal.details["RequestInfo"].request_id


async def test_weights_and_deadlines_that_are_no_numbers(place):
    for seconds in (math.nan, math.inf, -1.0):
        stub = LimitAdminStub(place.channel)
        request = limits_pb2.WatchLimitsRequest(tenant="acme", interval_seconds=seconds)
        assert (await refused(stub.Watch(request, metadata=as_key("admin")).read())).code == "INVALID_ARGUMENT"


async def test_limits_that_do_not_exist(place):
    stub, scope = LimitAdminStub(place.channel), limits_pb2.LimitScope(tenant="acme")
    for more in ({"lift": ["fame"]}, {"limits": limits_pb2.Limits(when_redis_is_away={"fame": "open"})}):
        request = limits_pb2.SetLimitsRequest(scope=scope, **more)
        refusal = await refused(stub.Set(request, metadata=as_key("admin")))
        assert refusal.code == "INVALID_ARGUMENT"
        assert "fame" in refusal.message


async def test_messages_that_are_too_large_never_arrive(place):
    refusal = await refused(place.generation.Generate(ask(prompt="x" * MAX_MESSAGE_BYTES), metadata=as_key()))
    assert refusal.code == "RESOURCE_EXHAUSTED"
    assert place.house.watcher.records == []


async def test_metadata_that_are_too_large_never_arrive(place):
    flood = [(f"x-{number}", "a" * 1000) for number in range(200)]
    with pytest.raises(grpc.aio.AioRpcError):
        await place.generation.Generate(ask(), metadata=(*as_key(), *flood))
    assert place.house.watcher.records == []
    await place.generation.Generate(ask(), metadata=as_key())


@pytest.mark.parametrize(
    "key", ["", "Bearer", "Bearer ", "Basic sk-acme", "bearer sk-acme sk-acme", "Bearer " + "x" * 5000]
)
async def test_keys_that_are_none(place, key):
    refusal = await refused(place.generation.Generate(ask(), metadata=(("authorization", key),)))
    assert refusal.code == "UNAUTHENTICATED"


async def test_noise_on_the_port_leaves_it_working(place):
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 10_000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000):
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
        writer.write(noise)
        await writer.drain()
        async with asyncio.timeout(30):
            while await reader.read(65536):
                pass
        writer.close()
    await place.generation.Generate(ask(), metadata=as_key())


async def test_who_never_reads_is_cut_off_and_settled(place, monkeypatch):
    monkeypatch.setattr(Call, "write_seconds", 0.3)
    house = place.house
    house.engine.info.max_model_len = 1_000_000
    house.engine.reply = lambda sent: "x" * 20_000
    wanted = ask(BASE, {"max_tokens": 20_000, "logprobs": 20})
    call = place.generation.GenerateStream(wanted, metadata=as_key())
    await call.initial_metadata()
    await until(lambda: len(house.watcher.records) == 1)
    [record] = house.watcher.records
    assert (record.finish, record.status) == ("cancelled", 499)
    assert 0 < record.completion_tokens < 20_000
    await place.assert_empty()
    assert list(house.limiter.ends.values()) == [[record.prompt_tokens + record.completion_tokens]]
    call.cancel()


RAW_METHODS = (
    "loralane.v1.Generation/Generate",
    "loralane.v1.Generation/GenerateStream",
    "loralane.v1.LimitAdmin/Watch",
    "loralane.v1.LaneAdmin/List",
    "grpc.health.v1.Health/Check",
)


@pytest.mark.parametrize("method", RAW_METHODS)
async def test_bytes_that_are_no_message_are_an_invalid_argument(place, method):
    call = place.channel.unary_stream(f"/{method}")(b"\xff\xff\xff\xff\x0f", metadata=as_key("admin"))
    refusal = await refused(call.read())
    assert refusal.code == "INVALID_ARGUMENT" and refusal.details["RequestInfo"].request_id
    assert "Exception" not in refusal.message and "DecodeError" not in refusal.message
    assert place.house.engine.requests == []


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_a_malformed_message_of_a_stream_is_an_invalid_argument(place, version):
    method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    call = place.channel.stream_stream(method)(iter([b"\xff\xff\xff\xff\x0f"]))
    assert (await refused(call.read())).code == "INVALID_ARGUMENT"
