"""Upstreams as members of virtual models: what is sent, relayed and charged, and what happens when they fail."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from fake_upstream import ANSWER, USAGE, FakeUpstream, delta, running_upstream
from fakes import ACME, BASE, GLOBEX, INITECH, GatewayApp, build_gateway_app, key_ring
from grpc_app import as_key, open_grpc_app
from structlog.testing import capture_logs

from gateway.config.upstreams import UpstreamConfig
from gateway.core.billing import BillingConfig, Price
from gateway.core.limits import Limits
from gateway.pb import generation_pb2 as pb
from gateway.requests.route_runner import RouteTable
from gateway.upstreams import client as client_module
from gateway.upstreams.breaker import SharedBreaker
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.wire import MOST_TOKENS
from gateway.virtual_models.acceptance import Acceptance, Verifier
from gateway.virtual_models.cascade import Cascade
from gateway.virtual_models.fallback import Fallback
from gateway.virtual_models.policy import Policy, Shadow
from gateway.virtual_models.split import Split

CLOUD, ROUTE, KEY = "cloud", "auto", "sk-of-the-cloud"
OPEN = replace(ACME, upstreams=("clo*",))
OTHER = replace(INITECH, upstreams=("*",))
"""Tenants whose data may leave."""
ALONE = Split({CLOUD: 1})
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def vectors_body(*vectors: Any) -> dict[str, Any]:
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return {"object": "list", "data": data[::-1], "usage": {"prompt_tokens": 5, "total_tokens": 5}}


class Place:
    """A gateway whose virtual model has an upstream among its members."""

    def __init__(self, app: GatewayApp, cloud: FakeUpstream, client: UpstreamClient, outcomes: list) -> None:
        self.app, self.cloud, self.client, self.outcomes = app, cloud, client, outcomes

    @property
    def charged(self) -> dict[str, int]:
        return {row.name.adapter: row.counts.tokens for row in self.app.limiter.rows}

    async def post(self, body: Mapping[str, Any], path: str = "/v1/chat/completions", key: str = "sk-acme"):
        async with self.app.client(key) as client:
            return await client.post(path, json={"model": ROUTE, **body})

    async def chat(self, **fields: Any):
        key = fields.pop("key", "sk-acme")
        return await self.post({"messages": [{"role": "user", "content": "hi"}], **fields}, key=key)


@pytest.fixture
async def make_place(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(client_module, "RETRY_SECONDS", 0.001)
    places: list[Place] = []
    async with AsyncExitStack() as stack:

        async def make(policy: Policy = ALONE, *, settings: Mapping[str, Any] | None = None, **answer: Any) -> Place:
            cloud = await stack.enter_async_context(running_upstream(**answer))
            client = UpstreamClient(CLOUD, UpstreamConfig(cloud.url, "big-1", KEY, **(settings or {})))
            stack.push_async_callback(client.close)
            outcomes: list = []
            billing = BillingConfig(
                prices=(Price(Decimal(5), Decimal(20), adapter=CLOUD), Price(Decimal(1), Decimal(1)))
            )
            table = RouteTable({ROUTE: policy}, upstreams={CLOUD: client}, billing=billing, observe=outcomes.append)
            app = await build_gateway_app(tmp_path, routes=table)
            owners = {"sk-acme": OPEN, "sk-closed": ACME, "sk-globex": GLOBEX, "sk-other": OTHER}
            app.open_again(key_ring(owners))
            places.append(Place(app, cloud, client, outcomes))
            places[-1].table = table
            return places[-1]

        yield make
        for place in places:
            await place.app.assert_empty()


async def test_a_chat_is_sent_and_its_answer_is_charged_as_the_upstream_counts(make_place):
    place = await make_place()
    with capture_logs() as logs:
        response = await place.chat(temperature=0.5, max_tokens=9, seed=3, stop=["x"])
    assert logs == [], "no observer failed"
    body = response.json()
    assert (response.status_code, body["choices"][0]["message"]["content"]) == (200, "From the cloud")
    assert (body["model"], body["x_loralane"]["model"], response.headers["x-loralane-model"]) == (ROUTE, CLOUD, CLOUD)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (7, 3)
    assert place.charged == {CLOUD: 10}
    [sent] = place.cloud.bodies
    assert sent == {
        "model": "big-1",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 3,
        "stop": ["x"],
    }
    assert f"authorization: Bearer {KEY}" in place.cloud.headers[0].replace("Authorization", "authorization")
    assert "sk-acme" not in place.cloud.headers[0]
    [outcome] = place.outcomes
    assert outcome.costs.actual == Decimal("0.000095")  # 7 at 5 and 3 at 20 a million


async def test_a_stream_is_relayed_as_it_comes(make_place):
    place = await make_place()
    response = await place.chat(stream=True, stream_options={"include_usage": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    said = [event["choices"][0]["delta"].get("content") for event in events if event["choices"]]
    assert [text for text in said if text] == ["From ", "the cloud"]
    assert events[-1]["usage"]["total_tokens"] == 10
    assert response.text.endswith("data: [DONE]\n\n")


async def test_data_leaves_only_for_tenants_that_permit_it(make_place):
    place = await make_place(Fallback((CLOUD, BASE), max_wait_s=9))
    answer = await place.chat(key="sk-closed")
    assert (answer.json()["x_loralane"]["model"], place.cloud.bodies) == (BASE, [])
    assert (await place.chat()).json()["x_loralane"]["model"] == CLOUD
    alone = await make_place()
    assert (await alone.chat(key="sk-closed")).json()["error"]["code"] == "model_not_found"
    assert alone.cloud.bodies == []


async def test_neither_verifiers_nor_shadows_take_data_out(make_place):
    verifier = Verifier(CLOUD, "{answer}?")
    place = await make_place(Cascade((BASE, "poet"), Acceptance(verifier=verifier), shadow=Shadow(CLOUD)))
    answer = await place.chat(key="sk-closed")
    assert (answer.json()["x_loralane"]["model"], place.cloud.bodies) == ("poet", [])


@pytest.mark.parametrize(
    "settings", [{"tenants": ("globex",)}, {"lanes": ("batch",)}], ids=["other tenants", "other lanes"]
)
async def test_the_upstream_has_tenants_and_lanes_too(make_place, settings):
    place = await make_place(settings=settings)
    assert (await place.chat()).status_code == 404


async def test_a_request_is_sent_again_before_the_first_token(make_place):
    place = await make_place(statuses=[503, 429], settings={"retries": 2})
    assert (await place.chat()).status_code == 200
    assert len(place.cloud.bodies) == 3


@pytest.mark.parametrize("status", [500, 401, 404])
async def test_a_failure_goes_to_the_next_member_and_is_not_charged(make_place, status):
    place = await make_place(Fallback((CLOUD, BASE)), statuses=[status] * 2)
    answer = await place.chat()
    assert (answer.json()["x_loralane"]["model"], answer.json()["x_loralane"]["reason"]) == (
        BASE,
        "upstream_unavailable",
    )
    assert len(place.cloud.bodies) == (2 if status == 500 else 1)
    assert place.charged.get(CLOUD, 0) == 0


@pytest.mark.parametrize(("status", "code"), [(500, "upstream_unavailable"), (422, None)])
async def test_a_failure_counts_in_the_requests_of_a_minute_without_tokens(make_place, status, code):
    place = await make_place(statuses=[status] * 9, settings={"retries": 0})
    await place.app.limiter.configure([replace(OPEN, limits=Limits(requests_per_minute=2, tokens_per_minute=300))])
    codes = [(await place.chat(max_tokens=100)).json()["error"]["code"] for _ in range(3)]
    assert codes == [code, code, "rate_limit_exceeded"]
    assert (len(place.cloud.bodies), place.charged) == (2, {})


async def test_what_is_not_sent_counts_nowhere(make_place):
    place = await make_place(statuses=[500], settings={"retries": 0, "failures": 1})
    await place.app.limiter.configure([replace(OPEN, limits=Limits(requests_per_minute=2))])
    assert [(await place.chat()).json()["error"]["code"] for _ in range(4)] == ["upstream_unavailable"] * 4
    assert (len(place.cloud.bodies), len(place.app.limiter.reserved)) == (1, 1)


async def test_a_caller_who_leaves_before_the_usage_pays_for_the_text(make_place):
    place = await make_place(events=[delta(role="assistant"), delta("word " * 40), *ANSWER[2:]], go_on=asyncio.Event())
    body = {"model": ROUTE, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with place.app.client() as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        while not (live := list(place.app.gateway.live.values())) or live[0].times.first_token is None:
            await asyncio.sleep(0.002)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await place.app.assert_empty()
    [record] = place.app.watcher.records
    assert place.charged == {CLOUD: record.prompt_tokens + 50}


@pytest.mark.parametrize(
    "failing", [{"statuses": [500] * 9}, {"events": [{"error": {"message": "overloaded"}}]}], ids=["status", "event"]
)
async def test_an_upstream_that_keeps_failing_is_left_alone(make_place, failing):
    place = await make_place(Fallback((CLOUD, BASE)), settings={"retries": 0, "failures": 2}, **failing)
    reasons = [(await place.chat()).headers["x-loralane-reason"] for _ in range(4)]
    assert reasons == ["upstream_unavailable", "upstream_unavailable", "down", "down"]
    assert len(place.cloud.bodies) == 2


async def test_an_upstream_that_keeps_breaking_off_is_left_alone(make_place):
    settings = {"retries": 0, "failures": 2}
    place = await make_place(Fallback((CLOUD, BASE)), settings=settings, events=ANSWER[:3])
    assert [(await place.chat()).status_code for _ in range(2)] == [503, 503]
    assert (await place.chat()).headers["x-loralane-reason"] == "down"
    assert len(place.cloud.bodies) == 2


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "hi"}]},
            {"events": [delta("x" * 1999), *ANSWER]},
        ),
        ("embeddings", {"input": "a"}, {"body": vectors_body([0.5] * 400)}),
        ("embeddings", {"input": "a", "dimensions": 2}, {"body": vectors_body([1.0, 2.0, 3.0])}),
    ],
    ids=["long", "long vectors", "dimensions"],
)
async def test_what_one_tenant_asks_for_does_not_keep_the_upstream_from_others(make_place, path, body, answer):
    place = await make_place(settings={"failures": 1, "retries": 0, "max_response_bytes": 1024}, **answer)
    assert (await place.post(body, f"/v1/{path}")).status_code != 200
    assert place.client.is_ready(OPEN)
    assert (place.charged.get(CLOUD, 0) > 0) == (path == "embeddings")  # the upstream has read those prompts


async def test_slow_requests_of_one_tenant_do_not_keep_the_upstream_from_others(make_place):
    settings = {"first_token_timeout_s": 0.05, "retries": 0, "failures": 2}
    place = await make_place(settings=settings, go_on=asyncio.Event(), hold_at=0)
    assert [(await place.chat()).status_code for _ in range(3)] == [503] * 3
    assert len(place.cloud.bodies) == 2
    place.cloud.go_on = None
    assert (await place.chat(key="sk-other")).status_code == 200
    assert (await place.chat()).status_code == 503 and not place.client.is_ready(OPEN)


def test_failures_of_several_tenants_in_a_row_stop_all():
    now = 0.0
    breaker = SharedBreaker(5, 30.0, lambda: now)
    for _ in range(9):
        breaker.failed("a")
    assert not breaker.allows("a") and breaker.allows("b")
    breaker.failed("b")
    assert not breaker.is_shut("b")
    breaker.failed("b")
    assert breaker.is_shut("b") and breaker.is_shut("c")
    now = 31.0
    assert breaker.allows("a") and not breaker.allows("c")
    breaker.failed("a")  # whose failures say nothing new
    assert not breaker.allows("a") and breaker.allows("c") and not breaker.allows("b")
    breaker.succeeded("c")
    assert breaker.allows("b") and not breaker.allows("a")
    breaker.failed("b")
    assert not breaker.is_shut("c")


async def test_a_caller_that_leaves_leaves_the_probe_to_the_next(make_place):
    settings = {"failures": 1, "retries": 0, "pause_s": 0.05}
    place = await make_place(statuses=[500], settings=settings, go_on=asyncio.Event())
    assert (await place.chat()).status_code == 503 and not place.client.is_ready(OPEN)
    await asyncio.sleep(0.05)
    place.client._breaker._own["acme"]._cooldown = 99.0
    probing = asyncio.create_task(place.chat())
    while len(place.cloud.bodies) < 2:
        await asyncio.sleep(0.001)
    assert not place.client.is_ready(OPEN)
    probing.cancel()
    await asyncio.wait([probing])
    place.cloud.go_on = None
    assert (await place.chat()).status_code == 200 and place.client.is_ready(OPEN)


async def test_the_last_member_s_failure_is_the_answer(make_place):
    place = await make_place(statuses=[500] * 2)
    answer = await place.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")
    assert KEY not in answer.text and place.cloud.url not in answer.text


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (400, {"message": "no such role"}, None),
        (400, {"message": "too long", "code": "context_length_exceeded"}, "context_length_exceeded"),
        (413, {}, "context_length_exceeded"),
    ],
)
async def test_what_the_upstream_refuses_is_the_caller_s_error(make_place, status, error, code):
    place = await make_place(statuses=[status], error=error)
    answer = await place.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert error.get("message", "413") in answer.json()["error"]["message"]
    assert len(place.cloud.bodies) == 1 and place.client.is_ready(OPEN)


async def test_a_limit_of_tokens_is_sent_in_the_field_that_the_upstream_s_model_takes(make_place):
    message = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    )
    error = {"message": message, "param": "max_tokens", "code": "unsupported_parameter"}
    place = await make_place(statuses=[400], error=error)
    assert [(await place.chat(max_tokens=9)).status_code for _ in range(2)] == [200, 200]
    first, *later = place.cloud.bodies
    assert first["max_tokens"] == 9
    assert [(body.get("max_tokens"), body["max_completion_tokens"]) for body in later] == [(None, 9)] * 2


BROKEN = {
    "no stream": {"content_type": "application/json"},
    "no JSON": {"events": ["{", "[DONE]"]},
    "another thing": {"events": ['{"choices": 3}', "[DONE]"]},
    "an error": {"events": [{"error": {"message": "secret"}}, "[DONE]"]},
    "nothing": {"events": ["[DONE]"]},
    "cut off": {"events": ANSWER[:1]},
    "without an end": {"events": [ANSWER[0], "[DONE]"]},
    "another answer": {"events": [{"choices": [{"index": 7, "delta": {"content": "x"}}]}, "[DONE]"]},
    "too long": {"events": [delta("x" * 900), delta("x" * 900), *ANSWER]},
    "a long line": {"events": ["x" * 2_000_000]},
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_answer_that_is_broken_is_a_failure(make_place, name):
    settings = {"max_response_bytes": 3_000_000 if name == "a long line" else 1500, "retries": 0}
    place = await make_place(settings=settings, **BROKEN[name])
    answer = await place.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")
    assert "secret" not in answer.text


async def test_a_silent_upstream_is_not_waited_for(make_place):
    settings = {"first_token_timeout_s": 0.05, "retries": 0, "idle_timeout_s": 9}
    place = await make_place(Fallback((CLOUD, BASE)), settings=settings, go_on=asyncio.Event(), hold_at=0)
    assert (await place.chat()).json()["x_loralane"]["reason"] == "upstream_unavailable"


async def test_a_stream_that_breaks_off_ends_with_an_error_and_what_came_is_charged(make_place):
    place = await make_place(events=ANSWER[:3])
    response = await place.chat(stream=True)
    assert '"code":"upstream_unavailable"' in response.text
    assert len(place.app.limiter.rows) == 1 and place.charged[CLOUD] > 2


@pytest.mark.parametrize("hold_at", [1, 2])
async def test_a_client_that_leaves_ends_the_request_at_the_upstream_and_pays_the_prompt(make_place, hold_at):
    place = await make_place(go_on=asyncio.Event(), hold_at=hold_at)
    running = asyncio.create_task(place.chat())
    while not place.cloud.bodies:
        await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(5):
        await place.cloud.left.wait()
    await place.app.gateway.close()
    assert place.charged[CLOUD] > 0


async def test_usage_that_cannot_be_is_cut(make_place):
    told = {"prompt_tokens": 10**17, "completion_tokens": -5, "prompt_tokens_details": {"cached_tokens": -1}}
    place = await make_place(events=(*ANSWER[:4], {"choices": [], "usage": told}, "[DONE]"))
    assert (await place.chat()).json()["usage"]["total_tokens"] == MOST_TOKENS


async def test_an_upstream_that_tells_no_usage_is_charged_by_the_text(make_place):
    place = await make_place(events=(*ANSWER[:4], "[DONE]"))
    usage = (await place.chat()).json()["usage"]
    assert (usage["completion_tokens"], place.charged[CLOUD]) == (3, usage["total_tokens"])
    assert usage["prompt_tokens"] > 0


async def test_a_deadline_ends_the_request_at_the_upstream(make_place):
    place = await make_place(go_on=asyncio.Event())
    answer = await place.chat(timeout=1.0)
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    async with asyncio.timeout(5):
        await place.cloud.left.wait()


async def test_only_so_many_requests_run_at_once(make_place):
    place = await make_place(Fallback((CLOUD, BASE)), settings={"max_requests": 1}, go_on=asyncio.Event())
    first = asyncio.create_task(place.chat())
    while not place.cloud.bodies:
        await asyncio.sleep(0.001)
    assert (await place.chat()).json()["x_loralane"]["model"] == BASE
    other = asyncio.create_task(place.chat(key="sk-other"))  # whose share is not taken by the first tenant
    while len(place.cloud.bodies) < 2:
        await asyncio.sleep(0.001)
    place.cloud.go_on.set()
    assert (await other).json()["x_loralane"]["model"] == CLOUD
    assert (await first).json()["x_loralane"]["model"] == CLOUD


def calling(*arguments: str):
    """Events that call a tool."""
    first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": ""}}
    parts = [{"index": 0, "function": {"arguments": text}} for text in arguments]
    calls = [delta(tool_calls=[part]) for part in (first, *parts)]
    return (delta(role="assistant"), *calls, delta(finish="tool_calls"), USAGE, "[DONE]")


async def test_tool_calls_come_and_go_in_every_protocol(make_place, tmp_path):
    place = await make_place(events=calling('{"a"', ": 1}"))
    turns = [
        {"role": "user", "content": "<tool_call>"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    chat = (await place.chat(messages=turns, tools=[TOOL], tool_choice="required")).json()["choices"][0]
    [call] = chat["message"]["tool_calls"]
    assert (call["function"], chat["finish_reason"]) == ({"name": "add", "arguments": '{"a": 1}'}, "tool_calls")
    sent = place.cloud.bodies[0]
    assert sent["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
    assert (sent["tools"][0]["function"]["name"], sent["tool_choice"]) == ("add", "required")
    stream = await place.chat(tools=[TOOL], stream=True)
    pieces = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    told = [piece["choices"][0]["delta"].get("tool_calls", [{}])[0].get("function", {}) for piece in pieces]
    assert "".join(one.get("arguments", "") for one in told) == '{"a": 1}'
    response = await place.post(
        {"input": "hi", "tools": [{"type": "function", "name": "add", "parameters": {}}]}, "/v1/responses"
    )
    assert response.json()["output"][0]["arguments"] == '{"a": 1}'
    assert (response.json()["temperature"], response.json()["top_p"]) == (None, None), "only the upstream knows them"
    tool = {"name": "add", "input_schema": {"type": "object"}}
    said = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    message = (await place.post(said, "/v1/messages")).json()
    assert (message["content"][0]["input"], message["stop_reason"]) == ({"a": 1}, "tool_use")


async def test_calls_are_numbered_and_named_once_however_the_upstream_tells_them(make_place):
    def told(index, id, name, arguments):
        call = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        return delta(tool_calls=[call])

    first = (told(2**64, "a", "add", ""), told(2**64, "a", "add", '{"a": '), told(2**64, None, None, "1}"))
    second = (told(2**64, "b", "add", "{"), told(2**64, "b", "", "}"))
    place = await make_place(events=(*first, *second, delta(finish="tool_calls"), USAGE, "[DONE]"))
    answer = await place.chat(tools=[TOOL], stream=True)
    pieces = [json.loads(line[6:])["choices"] for line in answer.text.splitlines() if line.startswith("data: {")]
    calls = [call for [choice] in pieces for call in choice["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]["name"]) for call in calls if "id" in call] == [(0, "add"), (1, "add")]
    arguments = ["".join(call["function"]["arguments"] for call in calls if call["index"] == at) for at in (0, 1)]
    assert arguments == ['{"a": 1}', "{}"]


async def test_a_schema_is_sent_as_a_schema(make_place):
    place = await make_place()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    await place.chat(response_format=wanted)
    await place.chat(response_format={"type": "json_object"})
    first, second = (body["response_format"] for body in place.cloud.bodies)
    assert (first["json_schema"]["schema"], second) == (schema, {"type": "json_object"})


@pytest.mark.parametrize(
    "text",
    ["{bad", '{"const": "\\ud800"}', "[" * 200 + "]" * 200, "5", '{"a":' * 200 + "1" + "}" * 200],
    ids=["bad", "half", "list", "number", "deep"],
)
async def test_a_schema_that_cannot_be_sent_is_refused(make_place, text):
    place = await make_place()
    answer = await place.chat(structured_outputs={"json": text})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs.json")
    assert (place.cloud.bodies, place.app.limiter.reserved) == ([], [])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
async def test_what_an_upstream_cannot_do_goes_to_the_next_member_or_is_refused(make_place, fields, param):
    place = await make_place(Fallback((CLOUD, BASE)))
    answer = await place.chat(**fields)
    assert (answer.json()["x_loralane"]["reason"], place.cloud.bodies) == ("unsupported_parameter", [])
    alone = await make_place()
    refused = await alone.chat(**fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    ids = await alone.post({"prompt": [5, 6]}, "/v1/completions")
    assert ids.json()["error"]["param"] == "prompt"


def piece(index: int, text: str = "", finish: str | None = None) -> dict[str, Any]:
    """An event of a stream of completions."""
    return {"choices": [{"index": index, "text": text, "finish_reason": finish, "logprobs": None}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_are_sent_as_completions(make_place, stream):
    events = (piece(1, "d"), piece(0, "b"), piece(0, "c", "length"), piece(1, "e", "stop"), USAGE, "[DONE]")
    place = await make_place(events=events)
    fields = {"prompt": ["a", "c"], "max_tokens": 2, "temperature": 0, "stream": stream, "echo": True}
    response = await place.post(fields, "/v1/completions")
    if stream:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        told = [choice for event in events for choice in event["choices"]]
    else:
        told = response.json()["choices"]
        assert response.json()["usage"]["total_tokens"] == 10
    texts = ["".join(choice["text"] for choice in told if choice["index"] == index) for index in (0, 1)]
    ends = {choice["index"]: choice["finish_reason"] for choice in told if choice["finish_reason"]}
    assert (texts, ends) == (["abc", "cde"], {0: "length", 1: "stop"})
    [sent] = place.cloud.bodies
    options = {"include_usage": True}
    wanted = {"prompt": ["a", "c"], "max_tokens": 2, "temperature": 0, "stream": True, "stream_options": options}
    assert sent == {"model": "big-1", **wanted}
    assert place.cloud.headers[0].startswith("POST /v1/completions ")
    assert place.charged == {CLOUD: 10}


IN_BASE64 = b64encode(np.array([3.0, 4.0], dtype="<f4").tobytes()).decode()


@pytest.mark.parametrize("second", [[3.0, 4.0], IN_BASE64], ids=["numbers", "base64"])
async def test_embeddings_are_sent_as_embeddings(make_place, second):
    place = await make_place(body=vectors_body([0.0, 2.0], second))
    answer = await place.post({"input": ["a", "b"], "dimensions": 2}, "/v1/embeddings")
    assert [item["embedding"] for item in answer.json()["data"]] == [[0.0, 1.0], pytest.approx([0.6, 0.8])]
    assert answer.json()["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert (answer.json()["model"], answer.headers["x-loralane-model"]) == (ROUTE, CLOUD)
    assert place.cloud.bodies == [{"model": "big-1", "input": ["a", "b"], "dimensions": 2, "encoding_format": "base64"}]
    assert place.cloud.headers[0].startswith("POST /v1/embeddings ")
    assert place.charged == {CLOUD: 5}
    as_it_came = await place.post({"input": [[5, 6], [7]], "normalize": False}, "/v1/embeddings")
    assert [item["embedding"] for item in as_it_came.json()["data"]] == [[0.0, 2.0], [3.0, 4.0]]
    assert place.cloud.bodies[1]["input"] == [[5, 6], [7]]


async def test_too_many_texts_are_refused_before_any_is_read(make_place):
    place = await make_place(body=vectors_body([1.0]))
    answer = await place.post({"input": ["a"] * 2049}, "/v1/embeddings")
    assert (answer.status_code, answer.json()["error"]["param"], place.cloud.bodies) == (400, "input", [])


@pytest.mark.parametrize("encoding", ["gzip", "br, identity"])
async def test_a_compressed_answer_is_refused_before_it_is_read(make_place, encoding):
    place = await make_place(encoding=encoding, settings={"retries": 0})
    assert (await place.chat()).json()["error"]["code"] == "upstream_unavailable"
    assert "accept-encoding: identity" in place.cloud.headers[0].lower()


@pytest.mark.parametrize("encoding", [" ", "Identity"])
async def test_an_answer_that_is_not_compressed_may_say_so(make_place, encoding):
    assert (await (await make_place(encoding=encoding)).chat()).status_code == 200


async def test_an_answer_with_too_many_vectors_goes_to_the_next_member_or_is_the_caller_s_error(make_place):
    place = await make_place(body=vectors_body([0.5] * 400), settings={"max_response_bytes": 1024})
    error = (await place.post({"input": "a"}, "/v1/embeddings")).json()["error"]
    assert (error["code"], error["param"], len(place.cloud.bodies)) == ("unsupported_parameter", "input", 1)
    assert "more than 1024 bytes" in error["message"]


async def test_texts_are_compared_by_the_vectors_of_an_upstream(make_place):
    place = await make_place(body=vectors_body([1.0, 0.0], [0.0, 3.0], [2.0, 1.0]))
    answer = await place.post({"text_1": "q", "text_2": ["a", "b"]}, "/v1/score")
    assert [round(item["score"], 3) for item in answer.json()["data"]] == [0.0, 0.894]
    assert (place.cloud.bodies[0]["input"], place.charged) == (["q", "a", "b"], {CLOUD: 5})


async def test_documents_are_ranked_by_the_vectors_of_an_upstream(make_place):
    place = await make_place(body=vectors_body([1.0, 0.0], [0.0, 3.0], [2.0, 1.0]))
    answer = await place.post({"query": "q", "documents": ["a", "b"]}, "/v1/rerank")
    assert [(item["index"], round(item["relevance_score"], 3)) for item in answer.json()["results"]] == [
        (1, 0.894),
        (0, 0.0),
    ]
    assert place.cloud.bodies[0]["input"] == ["q", "a", "b"]


@pytest.mark.parametrize(
    "body",
    [
        vectors_body([1.0]),
        vectors_body([1.0], [1.0, 2.0]),
        vectors_body([1.0, 2.0], "?"),
        vectors_body([], []),
        {"data": 3},
        {"error": {"message": "secret"}},
    ],
    ids=["too few", "two lengths", "no base64", "empty", "another thing", "an error"],
)
async def test_vectors_that_cannot_be_used_are_a_failure_and_free(make_place, body):
    place = await make_place(body=body, settings={"retries": 0})
    answer = await place.post({"input": ["a", "b"]}, "/v1/embeddings")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")
    assert (place.charged.get(CLOUD, 0), "secret" in answer.text) == (0, False)


async def test_vectors_come_from_upstreams_only_if_all_members_have_one_model(make_place):
    place = await make_place(Fallback((CLOUD, "cloud-2")), body=vectors_body([1.0]), statuses=[500] * 2)
    second = UpstreamClient("cloud-2", UpstreamConfig(place.cloud.url, "big-1"))
    place.table.upstreams["cloud-2"] = second
    answer = await place.post({"input": "a"}, "/v1/embeddings")
    assert (answer.status_code, answer.headers["x-loralane-model"]) == (200, "cloud-2")
    await second.close()
    mixed = await make_place(Fallback((CLOUD, BASE)), body=vectors_body([1.0]))
    assert (await mixed.post({"input": "a"}, "/v1/embeddings")).json()["error"]["param"] == "model"
    refused = await (await make_place()).post({"input": "a", "pooling": "mean"}, "/v1/embeddings")
    assert refused.json()["error"]["param"] == "pooling"


async def test_a_cascade_may_end_at_an_upstream(make_place):
    place = await make_place(Cascade((BASE, CLOUD), Acceptance(logprob=-0.4)))
    body = (await place.chat()).json()
    assert (body["x_loralane"]["model"], body["x_loralane"]["discarded"][0]["model"]) == (CLOUD, BASE)
    assert set(place.charged) == {BASE, CLOUD}


async def test_reasoning_is_relayed_apart(make_place):
    events = (delta(reasoning_content="Hm."), *ANSWER)
    place = await make_place(events=events)
    assert (await place.chat()).json()["choices"][0]["message"]["reasoning_content"] == "Hm."


async def test_an_upstream_over_grpc(make_place, tmp_path, monkeypatch):
    place = await make_place(events=(*ANSWER[:3], *calling("{}")[1:]))
    async with open_grpc_app(tmp_path, routes=place.table) as api:
        said, tool = [pb.ChatMessage(role="user", content="hi")], pb.Tool(name="add")
        request = pb.GenerateRequest(model=ROUTE, chat=pb.Chat(messages=said, tools=[tool]))
        with pytest.raises(grpc.aio.AioRpcError, match="does not exist"):  # this acme's data may not leave
            await api.generation.Generate(request, metadata=as_key())
        monkeypatch.setattr(UpstreamClient, "permits", lambda *_: True)
        whole = await api.generation.Generate(request, metadata=as_key())
        chunks = [chunk async for chunk in api.generation.GenerateStream(request, metadata=as_key())]
    assert (whole.choices[0].text, whole.choices[0].tool_calls[0].name) == ("From the cloud", "add")
    assert (whole.usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (7, 3)
    assert "".join(chunk.choice.text for chunk in chunks) == "From the cloud"
    assert "".join(call.arguments for chunk in chunks for call in chunk.choice.tool_calls) == "{}"


async def test_a_second_gateway_is_an_upstream(make_place, tmp_path):
    place = await make_place()
    (tmp_path / "second").mkdir()
    second = await build_gateway_app(tmp_path / "second")
    config = UpstreamConfig("http://127.0.0.1/v1", "pirate", "sk-acme")
    client = UpstreamClient(CLOUD, config, transport=httpx.ASGITransport(second.app))
    place.table.upstreams[CLOUD] = client
    body = (await place.chat(max_tokens=30)).json()
    assert (body["choices"][0]["message"]["content"], body["usage"]["completion_tokens"]) == ("Hello, world!", 14)
    [record] = second.watcher.records
    assert (record.served_name, record.used_tokens) == ("pirate", place.charged[CLOUD])
    await client.close()
    await second.assert_empty()
