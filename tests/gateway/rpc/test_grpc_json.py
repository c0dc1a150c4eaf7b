"""Responses and messages over gRPC: the JSON of the HTTP API, with the metadata, statuses and ends of other calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes import BASE
from grpc_app import NIGHT, GrpcApp, as_key, open_grpc_app, refused, until

from gateway.pb import json_api_pb2 as pb
from gateway.pb.json_api_pb2_grpc import JsonApiStub
from gateway.responses import background, events
from gateway.responses.service import Responses
from gateway.responses.store import ResponseStore

HELLO = "Hello, world!"
RESPONSE = {"model": BASE, "input": "hi", "max_output_tokens": 20}
MESSAGE = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
BODIES = {"create_response": RESPONSE, "create_message": MESSAGE}
PATHS = {"create_response": "/v1/responses", "create_message": "/v1/messages"}
IDS = ("id", "item_id", "created_at", "completed_at")
UNKNOWN = f"resp_{'0' * 32}"
every_kind = pytest.mark.parametrize("kind", BODIES)
each_way = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
async def api(tmp_path, valkey, monkeypatch) -> AsyncIterator[GrpcApp]:
    monkeypatch.setattr(background, "RENEW_SECONDS", 0.02)
    monkeypatch.setattr(events, "POLL_SECONDS", 0.005)
    responses = Responses(ResponseStore(valkey))
    async with open_grpc_app(tmp_path, responses=responses) as opened:
        yield opened
        await responses.background.drain(60)
        await opened.assert_empty()


def new(kind: str, **fields: Any) -> pb.JsonRequest:
    return pb.JsonRequest(**{kind: json.dumps(BODIES[kind] | fields)})


def stored(response_id: str, after: int | None = None) -> pb.JsonRequest:
    return pb.JsonRequest(get_response=pb.GetResponseRequest(response_id=response_id, starting_after=after))


async def call(api: GrpcApp, request: pb.JsonRequest, key: str = "acme", **more: Any) -> Any:
    return json.loads((await JsonApiStub(api.channel).Call(request, metadata=as_key(key), **more)).json)


async def stream(api: GrpcApp, request: pb.JsonRequest, key: str = "acme", **more: Any) -> list[Any]:
    answers = JsonApiStub(api.channel).Stream(request, metadata=as_key(key), **more)
    return [json.loads(answer.json) async for answer in answers]


def nameless(found: Any) -> Any:
    """The same without what differs between any two requests."""
    if isinstance(found, dict):
        return {name: nameless(value) for name, value in found.items() if name not in IDS}
    return [nameless(value) for value in found] if isinstance(found, list) else found


@every_kind
async def test_bodies_and_events_are_those_of_http(api, kind):
    async with api.gateway_app.client() as client:
        whole = (await client.post(PATHS[kind], json=BODIES[kind])).json()
        text = (await client.post(PATHS[kind], json=BODIES[kind] | {"stream": True})).text
    told = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert nameless(await call(api, new(kind))) == nameless(whole)
    assert nameless(await stream(api, new(kind, stream=True))) == nameless(told)
    assert len({tuple(ends) for ends in api.gateway_app.limiter.ends.values()}) == 1


@every_kind
@each_way
async def test_metadata_carry_id_lane_rates_and_usage(api, kind, stream):
    method = getattr(JsonApiStub(api.channel), "Stream" if stream else "Call")
    metadata = as_key("globex", x_request_id="mine-1")
    running = method(
        new(kind, stream=stream, service_tier="flex" if kind == "create_response" else "auto"), metadata=metadata
    )
    _ = [answer async for answer in running] if stream else await running
    initial, trailing = dict(await running.initial_metadata()), dict(await running.trailing_metadata())
    lane = "batch" if kind == "create_response" else "interactive"
    assert (initial["x-request-id"], initial["x-loralane-lane"]) == ("mine-1", lane)
    assert (initial["x-ratelimit-limit-requests"], initial["x-ratelimit-remaining-requests"]) == ("3", "2")
    [record] = api.gateway_app.watcher.records
    assert record.ingress.route == f"/loralane.v1.JsonApi/{'Stream' if stream else 'Call'}"
    assert trailing["x-loralane-prompt-tokens"] == str(record.work.prompt_tokens)
    assert trailing["x-loralane-completion-tokens"] == str(len(HELLO) + 1)


async def test_lanes_are_clamped(api):
    running = JsonApiStub(api.channel).Call(new("create_response"), metadata=as_key(NIGHT.name))
    await running
    assert dict(await running.initial_metadata())["x-loralane-lane"] == "batch"


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str, list[str]]] = [
    ({"input": []}, {"messages": []}, "acme", "INVALID_REQUEST", ["input", "messages"]),
    ({"max_output_tokens": 0}, {"max_tokens": 0}, "acme", "INVALID_REQUEST", ["max_output_tokens", "max_tokens"]),
    ({"input": "x" * 300}, {"system": "x" * 300}, "acme", "CONTEXT_LENGTH_EXCEEDED", ["input", "messages"]),
    ({"model": "poet"}, {"model": "poet"}, "globex", "MODEL_NOT_FOUND", ["model", "model"]),
    ({"max_output_tokens": 196}, {"max_tokens": 196}, "globex", "INSUFFICIENT_QUOTA", []),
    ({}, {}, "wrong", "INVALID_API_KEY", []),
    ({}, {}, "admin", "FORBIDDEN", []),
]


@pytest.mark.parametrize(("response", "message", "key", "reason", "fields"), REFUSED, ids=lambda value: str(value)[:30])
@each_way
async def test_refusals_are_statuses_that_name_the_field_of_the_body(
    api, response, message, key, reason, fields, stream
):
    method = getattr(JsonApiStub(api.channel), "Stream" if stream else "Call")
    for kind, changed, field in zip(BODIES, (response, message), fields or [None, None], strict=True):
        running = method(new(kind, stream=stream, **changed), metadata=as_key(key))
        refusal = await refused(running.read() if stream else running)
        assert (refusal.reason, refusal.fields if field else []) == (reason, [field] if field else [])
    assert api.gateway_app.engine.requests == []


async def test_what_a_call_cannot_do_is_refused_by_name(api):
    stub, key = JsonApiStub(api.channel), {"metadata": as_key()}
    for kind in BODIES:
        for running in (stub.Call(new(kind, stream=True), **key), stub.Stream(new(kind), **key).read()):
            assert (await refused(running)).fields == ["stream"]
    for running in (stub.Call(pb.JsonRequest(), **key), stub.Stream(pb.JsonRequest(), **key).read()):
        assert "one of create_response, create_message" in (await refused(running)).message
    assert (await refused(stub.Call(stored(UNKNOWN, 3), **key))).fields == ["starting_after"]
    others: dict[str, Any] = dict.fromkeys(("cancel_response", "delete_response", "count_message_tokens"), UNKNOWN)
    for kind, named in (others | {"list_input_items": pb.ListInputItemsRequest(response_id=UNKNOWN)}).items():
        refusal = await refused(stub.Stream(pb.JsonRequest(**{kind: named}), **key).read())
        assert (refusal.fields, refusal.message) == ([kind], f"{kind} has no stream; use Call")
    refusal = await refused(stub.Call(pb.JsonRequest(create_message="{"), **key))
    assert refusal.reason == "INVALID_JSON"


async def test_tokens_are_counted(api):
    body = json.dumps({name: MESSAGE[name] for name in ("model", "messages")})
    counted = await call(api, pb.JsonRequest(count_message_tokens=body))
    answer = await call(api, new("create_message"))
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}
    refusal = await refused(call(api, pb.JsonRequest(count_message_tokens=body), "admin"))
    assert refusal.reason == "FORBIDDEN"


@every_kind
@each_way
async def test_a_deadline_that_passes_aborts(api, kind, stream):
    api.gateway_app.engine.go_on = asyncio.Event()
    method = getattr(JsonApiStub(api.channel), "Stream" if stream else "Call")
    running = method(new(kind, stream=stream), metadata=as_key(), timeout=1.0)

    async def read() -> None:
        _ = [answer async for answer in running] if stream else await running

    assert (await refused(read())).code == "DEADLINE_EXCEEDED"
    await api.assert_empty()
    assert list(api.gateway_app.engine.ends.values()) == ["aborted"]


@every_kind
@each_way
async def test_cancelling_aborts_and_settles_what_was_used(api, kind, stream):
    api.gateway_app.engine.go_on = asyncio.Event()
    method = getattr(JsonApiStub(api.channel), "Stream" if stream else "Call")
    running = method(new(kind, stream=stream), metadata=as_key())
    await until(lambda: any(record.times.first_token for record in api.gateway_app.gateway.live.values()))
    running.cancel()
    await api.assert_empty()
    [record] = api.gateway_app.watcher.records
    assert (record.outcome.finish, record.outcome.status) == ("cancelled", 499)
    assert list(api.gateway_app.limiter.ends.values()) == [[record.work.prompt_tokens + 1]]


@every_kind
async def test_an_engine_that_dies_ends_the_stream_with_a_status(api, kind):
    api.gateway_app.engine.fail_after = 2
    assert (await refused(stream(api, new(kind, stream=True)))).code == "UNAVAILABLE"
    assert list(api.gateway_app.limiter.ends.values()) == [[0]]


async def test_stored_responses_are_read_continued_and_deleted(api):
    made = await call(api, new("create_response", store=True))
    assert (made["store"], await call(api, stored(made["id"]))) == (True, made)
    found = await stream(api, new("create_response", previous_response_id=made["id"], stream=True))
    assert found[-1]["response"]["previous_response_id"] == made["id"]
    for request in (stored(made["id"]), pb.JsonRequest(delete_response=made["id"])):
        assert (await refused(call(api, request, "initech"))).reason == "RESPONSE_NOT_FOUND"
    deleted = await call(api, pb.JsonRequest(delete_response=made["id"]))
    assert deleted == {"id": made["id"], "object": "response", "deleted": True}
    assert (await refused(call(api, stored(made["id"])))).code == "NOT_FOUND"


def input_items(response_id: str, **fields: Any) -> pb.JsonRequest:
    return pb.JsonRequest(list_input_items=pb.ListInputItemsRequest(response_id=response_id, **fields))


async def test_input_items_come_in_pages(api):
    items = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    made = await call(api, new("create_response", store=True, input=items))
    page = await call(api, input_items(made["id"], limit=2))
    assert (page["object"], page["has_more"], [texts(item) for item in page["data"]]) == ("list", True, ["c", "b"])
    rest = await call(api, input_items(made["id"], after=page["last_id"]))
    assert (rest["has_more"], [texts(item) for item in rest["data"]]) == (False, ["a"])
    oldest = await call(api, input_items(made["id"], oldest_first=True))
    assert oldest["data"] == [*rest["data"], *page["data"][::-1]]
    for fields, field in (({"limit": -1}, "limit"), ({"limit": 101}, "limit"), ({"after": "x"}, "after")):
        assert (await refused(call(api, input_items(made["id"], **fields)))).fields == [field]
    for response_id, key in ((UNKNOWN, "acme"), (made["id"], "initech")):
        assert (await refused(call(api, input_items(response_id), key))).reason == "RESPONSE_NOT_FOUND"


def texts(item: Any) -> str:
    return "".join(part["text"] for part in item["content"])


async def test_a_background_response_outlives_its_call_and_is_streamed_again(api):
    api.gateway_app.engine.go_on = asyncio.Event()
    request = new("create_response", background=True, stream=True)
    running = JsonApiStub(api.channel).Stream(request, metadata=as_key(), timeout=60)
    seen = [json.loads((await running.read()).json)]
    while "delta" not in seen[-1]:
        seen.append(json.loads((await running.read()).json))
    running.cancel()
    response_id = seen[0]["response"]["id"]
    assert (await call(api, stored(response_id)))["status"] == "in_progress"
    assert (await refused(stream(api, stored(response_id), "initech"))).reason == "RESPONSE_NOT_FOUND"
    api.gateway_app.engine.go_on.set()
    rest = await stream(api, stored(response_id, seen[-1]["sequence_number"]))
    assert [event["sequence_number"] for event in seen + rest] == list(range(len(seen + rest)))
    assert rest[-1]["response"]["output"][0]["content"][0]["text"] == HELLO
    assert await stream(api, stored(response_id)) == seen + rest


async def test_a_tenant_has_a_bounded_number_of_streams_of_stored_responses(api, monkeypatch):
    monkeypatch.setattr(api.gateway_app.gateway.watches, "most", 1)
    api.gateway_app.engine.go_on = asyncio.Event()
    create = new("create_response", background=True, stream=True)
    stub = JsonApiStub(api.channel)
    own, others = (aiter(stub.Stream(create, metadata=as_key(key))) for key in ("acme", "initech"))
    response_id = json.loads((await anext(own)).json)["response"]["id"]
    await anext(others)
    for request in (create, stored(response_id)):
        refusal = await refused(stream(api, request))
        assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "RATE_LIMIT_EXCEEDED")
    assert (await call(api, stored(response_id)))["id"] == response_id
    api.gateway_app.engine.go_on.set()
    _ = [[answer async for answer in running] for running in (own, others)]
    assert (await stream(api, stored(response_id)))[-1]["type"] == "response.completed"
    assert len(api.gateway_app.engine.requests) == 2, "one that was refused ran"


async def test_a_background_response_is_begun_and_cancelled(api):
    """The deadline of the call that begins it is not its own."""
    api.gateway_app.engine.go_on = asyncio.Event()
    made = await call(api, new("create_response", background=True, service_tier="flex"), timeout=60)
    assert made["status"] == "queued"
    await until(lambda: api.gateway_app.engine.open == 1)
    assert api.gateway_app.engine.requests[0].deadline > 10_000
    refusal = await refused(stream(api, stored(made["id"])))
    assert (refusal.code, refusal.fields) == ("INVALID_ARGUMENT", ["stream"])
    assert (await call(api, pb.JsonRequest(cancel_response=made["id"])))["status"] == "cancelled"


async def test_responses_are_stateless_where_the_operator_stores_none(tmp_path):
    async with open_grpc_app(tmp_path) as api:
        assert (await call(api, new("create_response")))["status"] == "completed"
        for fields in ({"store": True}, {"background": True}):
            refusal = await refused(call(api, new("create_response", **fields)))
            assert (refusal.reason, refusal.fields) == ("UNSUPPORTED_PARAMETER", list(fields))
        await api.assert_empty()
