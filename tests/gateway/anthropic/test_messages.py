"""Anthropic's Messages API over HTTP: bodies, answers, streams, errors and refusals."""

import json
import re

import pytest
from fakes import BASE, CONTEXT, TEMPLATE, GatewayApp, build_gateway_app, tiny_tokenizer
from httpx import Response

from engine.core.messages.requests import ErrorCode, FinishReason, Lane, Refusal, TokenEvent
from gateway.anthropic.parse import parse
from gateway.anthropic.prompt import chat_of
from gateway.anthropic.schema import MessagesRequest
from gateway.core.json_bounds import MOST_VALUES

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hi"}
BODY = {"model": BASE, "max_tokens": 400, "messages": [USER]}
LOOK = {
    "name": "look",
    "description": "Looks somewhere.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}
ANSWER = 'Let me see. <tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'
TWO = ANSWER + '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    gateway_app = await build_gateway_app(tmp_path, ping_seconds=0.02)
    gateway_app.engine.info.max_model_len = 4096
    return gateway_app


async def post(gateway_app, body, path=PATH, headers=None) -> Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with gateway_app.client(None) as client:
        return await client.post(path, content=content, headers=headers or {"x-api-key": "sk-acme"})


async def ask(gateway_app, **fields) -> dict:
    response = await post(gateway_app, BODY | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(gateway_app, **fields) -> list[dict]:
    """Return the data of all events but pings; every event has the name of its type."""
    response = await post(gateway_app, BODY | fields | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = [frame.split("\n") for frame in response.text.removesuffix("\n\n").split("\n\n")]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in frames]
    assert all(name == data["type"] for name, data in events)
    return [data for _, data in events if data["type"] != "ping"]


def refused(response, status, kind, *words) -> None:
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), response.text
    assert set(body) == {"type", "error", "request_id"}
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    for word in words:
        assert word in body["error"]["message"]


def prompt_of(gateway_app) -> str:
    return tiny_tokenizer().decode(gateway_app.engine.requests[-1].prompt_ids, skip_special=False).replace("&#34;", '"')


async def test_a_message_is_answered(gateway_app):
    gateway_app.engine.cached = lambda request: 2
    message = await ask(gateway_app, model="captain")
    assert message.pop("id").startswith("msg_")
    usage = message.pop("usage")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "captain",
        "content": [{"type": "text", "text": "Hello, world!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    prompt = len(gateway_app.engine.requests[-1].prompt_ids)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt - 2, 2)
    assert usage["output_tokens"] == len("Hello, world!") + 1
    await gateway_app.assert_empty()


@pytest.mark.parametrize("tokens_per_event", [1, 5, 100])
async def test_a_stream_has_the_events_of_one_text(gateway_app, tokens_per_event):
    gateway_app.engine.tokens_per_event = tokens_per_event
    gateway_app.engine.cached = lambda request: 2
    first, begin, *deltas, end, last, stop = await stream(gateway_app)
    assert (first["type"], first["message"]["content"], first["message"]["stop_reason"]) == ("message_start", [], None)
    prompt = len(gateway_app.engine.requests[-1].prompt_ids)
    assert first["message"]["usage"]["input_tokens"] == prompt
    block = {"type": "text", "text": ""}
    assert begin == {"type": "content_block_start", "index": 0, "content_block": block}
    assert {delta["delta"]["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["delta"]["text"] for delta in deltas) == "Hello, world!"
    assert end == {"type": "content_block_stop", "index": 0}
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert (last["usage"]["input_tokens"], last["usage"]["output_tokens"]) == (prompt - 2, 14)
    assert stop == {"type": "message_stop"}


async def test_an_empty_answer_has_no_blocks(gateway_app):
    gateway_app.engine.reply = lambda request: ""
    assert (await ask(gateway_app))["content"] == []
    assert [event["type"] for event in await stream(gateway_app)] == ["message_start", "message_delta", "message_stop"]


async def test_a_silent_stream_has_pings(gateway_app):
    gateway_app.engine.pause = 0.05
    response = await post(gateway_app, BODY | {"stream": True, "max_tokens": 4})
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in response.text


async def test_a_stop_sequence_is_told(gateway_app):
    fields = {"stop_sequences": ["xyz", "wor"]}
    message = await ask(gateway_app, **fields)
    assert message["content"][0]["text"] == "Hello, "
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "wor")
    *_, last, _ = await stream(gateway_app, **fields)
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "wor"}


async def test_a_full_answer_says_so(gateway_app):
    message = await ask(gateway_app, max_tokens=5)
    assert (message["content"][0]["text"], message["stop_reason"]) == ("Hello", "max_tokens")


@pytest.mark.parametrize("tokens_per_event", [1, 7, 200])
async def test_tool_calls_are_blocks(gateway_app, tokens_per_event):
    gateway_app.engine.tokens_per_event = tokens_per_event
    gateway_app.engine.reply = lambda request: TWO
    message = await ask(gateway_app, tools=[LOOK])
    text, *calls = message["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "look", {"at": "sea"}),
        ("tool_use", "look", {"at": "sky"}),
    ]
    assert len({call["id"] for call in calls}) == 2
    assert message["stop_reason"] == "tool_use"
    events = await stream(gateway_app, tools=[LOOK])
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [(event["index"], event["content_block"]["type"]) for event in starts] == [
        (0, "text"),
        (1, "tool_use"),
        (2, "tool_use"),
    ]
    assert starts[1]["content_block"]["input"] == {}
    pieces = [event["delta"]["partial_json"] for event in events if event.get("index") == 2 and "delta" in event]
    assert json.loads("".join(pieces)) == {"at": "sky"}
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_one_call_is_kept_where_others_are_not_wanted(gateway_app):
    gateway_app.engine.reply = lambda request: TWO
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = await ask(gateway_app, tools=[LOOK], tool_choice=choice)
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]


async def test_arguments_that_are_cut_off_are_kept_as_text(gateway_app):
    gateway_app.engine.reply = lambda request: ANSWER
    message = await ask(gateway_app, tools=[LOOK], max_tokens=60)
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][-1]["input"] == {"arguments": '{"at": '}


@pytest.mark.parametrize("tokens_per_event", [1, 200])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('"not json"', {"arguments": "not json"}),
        ("[1, 2]", {"arguments": "[1, 2]"}),
        ("null", {"arguments": "null"}),
        (' {"at": "sea"}, "arguments": {"at": "sky"}', {"at": "sea"}),
        ('"{\\"at\\": 1}"', {"at": 1}),
    ],
)
async def test_streamed_arguments_are_an_object(gateway_app, tokens_per_event, arguments, expected):
    gateway_app.engine.tokens_per_event = tokens_per_event
    gateway_app.engine.reply = lambda request: f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
    message, events = await ask(gateway_app, tools=[LOOK]), await stream(gateway_app, tools=[LOOK])
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == message["content"][0]["input"] == expected


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
async def test_a_required_call_follows_a_grammar(gateway_app, choice):
    await ask(gateway_app, tools=[LOOK], tool_choice=choice)
    assert gateway_app.engine.requests[-1].params.grammar is not None
    await ask(gateway_app, tools=[LOOK], tool_choice={"type": "auto"})
    assert gateway_app.engine.requests[-1].params.grammar is None


async def test_tools_that_must_not_be_called_are_not_shown(gateway_app):
    await ask(gateway_app, tools=[LOOK], tool_choice={"type": "none"})
    assert "look" not in prompt_of(gateway_app)


async def test_an_output_format_is_followed(gateway_app):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await ask(gateway_app, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "high"})
    assert json.loads(gateway_app.engine.requests[-1].params.grammar.text) == schema


SAID = [
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "user", "content": "three"},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sea"}},
            {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {"at": "sky"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "blue"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "grey"}]},
            {"type": "text", "text": "four"},
        ],
    },
]


async def test_the_prompt_has_all_that_was_said(gateway_app):
    system = [
        {"type": "text", "text": "Be"},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ]
    await ask(gateway_app, system=system, messages=SAID)
    assert prompt_of(gateway_app) == (
        "<|system|>Be\nbrief.<|end|><|user|>one\ntwo\nthree<|end|><|assistant|>I look."
        '{"name": "look", "arguments": {"at": "sea"}}{"name": "look", "arguments": {"at": "sky"}}<|end|>'
        "<|tool|>blue<|end|><|tool|>grey<|end|><|user|>four<|end|><|assistant|>"
    )


async def test_what_no_model_of_text_reads_ends_no_session(gateway_app):
    """Agents send results of tools again with each request: images that they have looked at, and encrypted reasoning of
    another service."""
    thought = {"type": "redacted_thinking", "data": "EmwKAhgB"}
    shown = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a.png"}, IMAGE]}
    said = [
        USER,
        {"role": "assistant", "content": [thought, *called()["content"]]},
        {"role": "user", "content": [shown]},
    ]
    await ask(gateway_app, messages=said)
    assert re.search(r"<\|tool\|>a\.png\n\[.*reads text only: image\]<\|end\|>", prompt_of(gateway_app))
    assert "EmwKAhgB" not in prompt_of(gateway_app)


async def test_a_system_prompt_may_be_a_text(gateway_app):
    await ask(gateway_app, system="Be brief.")
    assert prompt_of(gateway_app) == "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"


async def test_an_answer_continues_what_the_assistant_began(gateway_app):
    message = await ask(gateway_app, messages=[USER, {"role": "assistant", "content": "It is"}])
    assert prompt_of(gateway_app) == "<|user|>hi<|end|><|assistant|>It is"
    assert message["content"][0]["text"] == "Hello, world!"


async def test_tokens_are_counted_as_they_are_charged(gateway_app):
    fields = {"system": "Be brief.", "messages": SAID, "tools": [LOOK]}
    message = await ask(gateway_app, **fields)
    response = await post(gateway_app, {"model": BASE, **fields}, COUNT)
    assert response.json() == {"input_tokens": message["usage"]["input_tokens"]}
    refused(await post(gateway_app, {"model": "none", **fields}, COUNT), 404, "not_found_error", "none")


@pytest.mark.parametrize(
    ("tier", "lane"),
    [
        ("flex", Lane.BATCH),
        ("priority", Lane.INTERACTIVE),
        ("standard_only", Lane.INTERACTIVE),
        ("auto", Lane.INTERACTIVE),
    ],
)
async def test_a_tier_chooses_the_lane(gateway_app, tier, lane):
    response = await post(gateway_app, BODY | {"service_tier": tier})
    assert gateway_app.engine.requests[-1].lane is lane
    assert response.headers["x-loralane-lane"] == lane.name.lower()


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "sk-acme"},
        {"authorization": "Bearer sk-acme"},
        {"authorization": "Bearer sk-acme", "x-api-key": "x"},
        {"authorization": "Bearer ", "x-api-key": "sk-acme"},
        {"authorization": "Bearer", "x-api-key": "sk-acme"},
    ],
)
async def test_a_key_comes_in_either_header(gateway_app, headers):
    response = await post(gateway_app, BODY, headers=headers | {"anthropic-version": "2023-06-01"})
    assert response.status_code == 200


@pytest.mark.parametrize("headers", [{"x-api-key": "sk-wrong"}, {"x-api-key": ""}, {"accept": "*/*"}])
async def test_no_answer_without_a_key(gateway_app, headers):
    for path in (PATH, COUNT):
        refused(await post(gateway_app, BODY, path, headers), 401, "authentication_error", "x-api-key")


async def test_an_administrators_key_makes_no_messages(gateway_app):
    refused(await post(gateway_app, BODY, headers={"x-api-key": "sk-admin"}), 403, "permission_error")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}


def user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (user({"type": "text", "text": "look"}, IMAGE), ["messages[0].content[1].type", "'image'"]),
        (user({"type": "document", "source": {}}), ["messages[0].content[0].type", "'document'"]),
        (user({"type": "web_search_tool_result", "content": []}), ["'web_search_tool_result'"]),
        ({"system": [IMAGE]}, ["system[0].type", "'image'"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["thinking is not supported"]),
        ({"container": "x"}, ["container"]),
        ({"mcp_servers": [{"name": "x"}]}, ["mcp_servers"]),
        ({"output_format": {"type": "json_schema"}}, ["output_format", "use output_config.format"]),
        ({"seed": 7}, ["seed", "/v1/chat/completions"]),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            ["tools[0].type", "'web_search_20250305'"],
        ),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, ["output_config.format.type", "'xml'"]),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(gateway_app, fields, words):
    for path in (PATH, COUNT) if "output_config" not in fields else (PATH,):
        refused(await post(gateway_app, BODY | fields, path), 400, "invalid_request_error", *words)
    assert gateway_app.engine.requests == []


@pytest.mark.parametrize("kind", ["disabled", "adaptive"])
async def test_a_model_that_cannot_think_may_be_asked_to_decide_itself(gateway_app, kind):
    """Claude Code asks for adaptive thinking unless it is told otherwise."""
    await ask(gateway_app, thinking={"type": kind}, metadata={"user_id": "x"}, cache_control=None)
    assert (await post(gateway_app, BODY | {"thinking": {"type": kind}}, COUNT)).status_code == 200


THINKING = TEMPLATE + (
    "{% if thinking is defined %}[{{ 'on' if enable_thinking else 'off' }}]{% endif %}{# <think> #}"
    "{% for message in messages %}{{ message.reasoning_content }}{% endfor %}"
)


@pytest.mark.parametrize("tokens_per_event", [1, 4, 100])
async def test_reasoning_is_a_block_before_the_text(gateway_app, monkeypatch, tokens_per_event):
    monkeypatch.setattr(gateway_app.engine.tokenizer._template, "chat_template", THINKING)
    gateway_app.engine.reply = lambda request: "<think>\nHm. \n</think>\n\nHi."
    gateway_app.engine.tokens_per_event = tokens_per_event
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    answer = await ask(gateway_app, thinking={"type": "enabled", "budget_tokens": 1024})
    assert answer["content"] == [thought, {"type": "text", "text": "Hi."}]
    events = await stream(gateway_app, thinking={"type": "adaptive"})
    assert [event["content_block"]["type"] for event in events if "content_block" in event] == ["thinking", "text"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("text", "") for delta in deltas) == "Hi."
    messages = [*BODY["messages"], {"role": "assistant", "content": [thought]}, *BODY["messages"]]
    await ask(gateway_app, thinking={"type": "disabled"}, messages=messages)
    asked = [gateway_app.engine.tokenizer.decode(sent.prompt_ids) for sent in gateway_app.engine.requests]
    assert [next(mark for mark in ("[on]", "[off]") if mark in text) for text in asked] == ["[on]", "[on]", "[off]"]
    assert asked[-1].endswith("Hm.")
    wrong = {"messages": [{"role": "user", "content": [thought]}], "thinking": {"type": "enabled"}}
    refused(await post(gateway_app, BODY | wrong), 400, "invalid_request_error", "messages[0].content[0].type")
    refused(
        await post(gateway_app, BODY | {"thinking": {"type": "much"}}), 400, "invalid_request_error", "thinking.type"
    )


def called(number: int = 1) -> dict:
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": "look", "input": {}}
    return {"role": "assistant", "content": [call]}


def deep(levels: int) -> dict:
    return {"a": deep(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, ["max_tokens"]),
        ({"max_tokens": 0}, ["max_tokens"]),
        ({"messages": []}, ["messages must not be empty"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["messages[0].role", "'tool'"]),
        ({"messages": "hi"}, ["messages"]),
        ({"temprature": 1}, ["temperature"]),
        ({"temperature": 3}, ["temperature"]),
        ({"stop_sequences": [""]}, ["stop_sequences: stop strings"]),
        ({"tools": [LOOK | {"strct": True}]}, ["tools[0].strct", "'strict'"]),
        ({"output_config": {"fromat": {}}}, ["output_config.fromat", "'format'"]),
        ({"service_tier": "fast"}, ["service_tier"]),
        ({"messages": [USER, called()]}, ["tool_result"]),
        (
            {"messages": [USER, called(2), {"role": "user", "content": [RESULT]}]},
            ["messages[2].content[0].tool_use_id"],
        ),
        ({"messages": [{"role": "user", "content": called()["content"]}]}, ["only an assistant"]),
        (user({"type": "redacted_thinking", "data": "hm"}), ["only an assistant"]),
        ({"messages": [USER, {"role": "assistant", "content": [RESULT]}]}, ["only a user"]),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, ["text"]),
        ({"tools": [LOOK, LOOK]}, ["two tools"]),
        ({"tools": [LOOK | {"name": "a b"}]}, ["tools[0].name"]),
        ({"tools": [{"name": "look"}]}, ["input_schema"]),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "other"}}, ["tool_choice.name"]),
        ({"tools": [LOOK], "tool_choice": {"type": "each"}}, ["tool_choice.type"]),
        ({"tool_choice": {"type": "any"}}, ["tool_choice needs tools"]),
        ({"tools": [LOOK | {"strict": True, "input_schema": {"type": "what"}}]}, ["tools[0].input_schema"]),
        ({"tools": [LOOK | {"input_schema": deep(120)}]}, ["tools", "deep"]),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, ["prompt is too long: "]),
    ],
)
async def test_what_is_wrong_is_named(gateway_app, fields, words):
    refused(await post(gateway_app, BODY | fields), 400, "invalid_request_error", *words)
    assert gateway_app.engine.requests == []


async def test_extensions_are_those_of_chats(gateway_app):
    slo = {"ttft_ms": 250, "itl_ms": 50}
    await ask(gateway_app, priority=-3, slo=slo, cache_salt="user 1", timeout=60, stall_timeout=50, speculation="off")
    [sent] = gateway_app.engine.requests
    assert not sent.params.speculates
    assert (sent.priority, sent.ttft, sent.itl, sent.cache_salt) == (-3, 0.25, 0.05, "user 1")


def test_many_blocks_after_a_long_one_are_joined():
    """Joined one by one, they took a minute, for which the event loop stood still."""
    messages = user({"type": "text", "text": "a" * 7_000_000}, *[{"type": "text", "text": "b"}] * 10_000)
    [message] = chat_of(parse(json.dumps(BODY | messages).encode(), MessagesRequest)).messages
    assert message["content"] == "a" * 7_000_000 + "\nb" * 10_000


async def test_hostile_bodies_are_bounded(gateway_app):
    nested = deep(150)
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": nested}
    messages = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [RESULT]}]
    refused(await post(gateway_app, BODY | {"messages": messages}), 400, "invalid_request_error", "deep")
    nested = b'{"messages":' + b"[" * 50_000
    refused(await post(gateway_app, nested), 400, "invalid_request_error", "the body")
    many = [{"type": "text", "text": ""}] * (MOST_VALUES // 3)
    refused(await post(gateway_app, BODY | user(*many)), 400, "invalid_request_error", str(MOST_VALUES))
    assert (await post(gateway_app, BODY | user(*many[10:]))).status_code == 200
    tools = [{"type": "web_search"}] * MOST_VALUES
    refused(await post(gateway_app, BODY | {"tools": tools}), 400, "invalid_request_error", str(MOST_VALUES))
    refused(await post(gateway_app, b"x" * (9 * 2**20)), 413, "request_too_large")


async def test_other_paths_and_methods_are_refused_in_the_same_shape(gateway_app):
    refused(await post(gateway_app, {}, "/v1/messages/batches"), 404, "not_found_error", "/v1/batches")
    async with gateway_app.client() as client:
        refused(await client.get(PATH), 405, "invalid_request_error", "POST")


@pytest.mark.parametrize("code", [ErrorCode.LANE_QUEUE_FULL, ErrorCode.QUEUE_TIMEOUT])
async def test_a_lack_of_capacity_is_an_overload(gateway_app, code):
    gateway_app.engine.last_words = TokenEvent(
        "x", finish_reason=FinishReason.ERROR, refusal=Refusal(code, "too many are waiting", 7.0)
    )
    response = await post(gateway_app, BODY | {"stream": True})
    refused(response, 529, "overloaded_error", "too many")
    assert response.headers["retry-after"] == "7"


async def test_limits_are_those_of_chats(gateway_app):
    for _ in range(3):
        response = await post(gateway_app, BODY | {"max_tokens": 4}, headers={"x-api-key": "sk-globex"})
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "3"
    refused(await post(gateway_app, BODY, headers={"x-api-key": "sk-globex"}), 429, "rate_limit_error")
    await gateway_app.assert_empty()


async def test_an_engine_that_is_lost_ends_the_stream_with_an_error(gateway_app):
    gateway_app.engine.fail_after = 3
    gateway_app.engine.ready = True
    *_, last = await stream(gateway_app)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["request_id"]
    await gateway_app.assert_empty()


async def test_a_bug_is_told_in_the_same_shape(gateway_app, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("gateway.anthropic.render.MessageRenderer.complete", broken)
    response = await post(gateway_app, BODY)
    refused(response, 500, "api_error", "request id")
    assert "secret" not in response.text


async def test_the_prompt_must_fit(tmp_path):
    gateway_app = await build_gateway_app(tmp_path)
    body = BODY | {"messages": [{"role": "user", "content": "x" * CONTEXT}]}
    answer = await post(gateway_app, body)
    refused(answer, 400, "invalid_request_error")
    assert re.fullmatch(rf"prompt is too long: \d+ tokens > {CONTEXT} maximum", answer.json()["error"]["message"])
