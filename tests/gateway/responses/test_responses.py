"""/v1/responses with OpenAI's own client, and what it refuses."""

import json
import re

import openai
import pytest
import structlog.testing
from fakes import BASE, GatewayApp, build_gateway_app, ids_of, tiny_tokenizer

from engine.core.messages.grammar import GrammarKind
from engine.core.messages.requests import Lane
from gateway.core.json_bounds import MOST_VALUES
from gateway.responses.parse import parse
from tests.grammar_walk import walk

HELLO = "Hello, world!"
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Looks somewhere.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 9}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
LOOSE = {**LOOK, "strict": False}
CALLS = (
    'So: <tool_call>{"name": "look", "arguments": {"place": "sea"}}</tool_call>'
    '<tool_call>{"name": "look", "arguments": {"place": "sky"}}</tool_call>'
)
BODY = {"model": BASE, "input": "hi"}


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    gateway_app = await build_gateway_app(tmp_path)
    gateway_app.engine.info.max_model_len = 2048
    return gateway_app


async def create(gateway_app, **fields):
    async with gateway_app.openai() as client:
        return await client.responses.create(**BODY | fields)


async def events_of(gateway_app, **fields):
    """The events of a stream, checked to be numbered from 0."""
    async with gateway_app.openai() as client:
        events = [event async for event in await client.responses.create(**BODY | fields, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    await gateway_app.assert_empty()
    return events


async def post(gateway_app, key="sk-acme", **fields):
    async with gateway_app.client(key) as client:
        return await client.post("/v1/responses", json=BODY | fields)


def prompt(gateway_app) -> str:
    [sent] = gateway_app.engine.requests
    return tiny_tokenizer().decode(sent.prompt_ids, skip_special=False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"summary": "x" * 300}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": "x" * 300}}, "reasoning.generate_summary"),
        ({"text": {"format": {"type": "text", "description": "x" * 20_000}}}, "text.format.description"),
    ],
)
async def test_what_every_event_repeats_is_short(gateway_app, fields, param):
    """8 MiB of it held the event loop for 50 ms each time that the response was written."""
    answer = await post(gateway_app, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_response(gateway_app):
    gateway_app.engine.cached = lambda request: 3
    answer = await create(gateway_app, metadata={"a": "b"}, temperature=0.5, top_p=0.9, service_tier="flex")
    assert (answer.output_text, answer.status, answer.error, answer.incomplete_details) == (
        HELLO,
        "completed",
        None,
        None,
    )
    assert answer.id.startswith("resp_") and answer.object == "response" and answer.model == BASE
    [message] = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    usage = answer.usage
    assert (usage.output_tokens, usage.input_tokens_details.cached_tokens) == (len(HELLO) + 1, 3)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (answer.metadata, answer.temperature, answer.top_p) == ({"a": "b"}, 0.5, 0.9)
    assert (answer.service_tier, answer.truncation, answer.model_extra.get("store")) == ("flex", "disabled", False)
    [sent] = gateway_app.engine.requests
    assert (sent.lane, sent.params.temperature, sent.params.top_p) == (Lane.BATCH, 0.5, 0.9)
    await gateway_app.assert_empty()


async def test_an_adapter(gateway_app):
    answer = await create(gateway_app, model="pirate")
    [sent] = gateway_app.engine.requests
    assert (answer.model, sent.adapter_hash) == ("pirate", gateway_app.adapters.records["pirate"].version)


async def test_extensions(gateway_app):
    slo = {"ttft_ms": 250, "itl_ms": 50}
    own = {"cache_salt": "user 1", "adapter_id": "pirate", "speculation": "off"}
    response = await post(gateway_app, priority=-3, slo=slo, **own)
    [sent] = gateway_app.engine.requests
    assert not sent.params.speculates
    assert (response.status_code, sent.priority, sent.ttft, sent.itl) == (200, -3, 0.25, 0.05)
    assert (sent.cache_salt, sent.adapter_hash) == ("user 1", gateway_app.adapters.records["pirate"].version)


async def test_an_incomplete_response(gateway_app):
    answer = await create(gateway_app, max_output_tokens=4)
    assert (answer.output_text, answer.status) == ("Hell", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.output[0].status, answer.max_output_tokens) == ("incomplete", 4)
    *_, last = await events_of(gateway_app, max_output_tokens=4)
    assert (last.type, last.response.status, last.response.output_text) == ("response.incomplete", "incomplete", "Hell")


async def test_an_empty_answer_is_a_message_without_text(gateway_app):
    gateway_app.engine.reply = lambda sent: ""
    answer = await create(gateway_app)
    assert [(item.type, item.content[0].text) for item in answer.output] == [("message", "")]


async def test_the_events_of_a_message(gateway_app):
    events = await events_of(gateway_app)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == HELLO
    assert [event.type for event in events if event not in deltas] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    created, last = events[0].response, events[-1].response
    assert (created.status, created.output, created.usage, created.id) == ("in_progress", [], None, last.id)
    assert (last.status, last.output_text, last.usage.output_tokens) == ("completed", HELLO, len(HELLO) + 1)
    text = next(event for event in events if event.type == "response.output_text.done")
    assert (text.text, text.item_id, text.output_index) == (HELLO, last.output[0].id, 0)


async def test_the_events_of_tool_calls(gateway_app):
    gateway_app.engine.reply = lambda sent: CALLS
    events = await events_of(gateway_app, tools=[LOOSE])
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.type for item in added] == ["message", "function_call", "function_call"]
    for index, place in ((1, "sea"), (2, "sky")):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        kinds = [event.type.removeprefix("response.") for event in mine]
        assert kinds[0] == "output_item.added" and kinds[-1] == "output_item.done"
        assert kinds[-2] == "function_call_arguments.done"
        assert set(kinds[1:-2]) == {"function_call_arguments.delta"}
        assert "".join(event.delta for event in mine[1:-2]) == mine[-2].arguments == mine[-1].item.arguments
        assert json.loads(mine[-2].arguments) == {"place": place}
        assert mine[0].item.call_id == mine[-1].item.call_id
    assert len({item.call_id for item in added[1:]}) == 2
    assert [item.status for item in events[-1].response.output] == ["completed"] * 3


async def test_a_stream_and_a_whole_response_have_the_same_items(gateway_app):
    gateway_app.engine.reply = lambda sent: CALLS
    whole = await create(gateway_app, tools=[LOOSE])
    streamed = (await events_of(gateway_app, tools=[LOOSE]))[-1].response
    told = [
        [(item.type, getattr(item, "arguments", None) or item.content[0].text) for item in answer.output]
        for answer in (whole, streamed)
    ]
    assert (
        told[0]
        == told[1]
        == [
            ("message", "So:"),
            ("function_call", '{"place": "sea"}'),
            ("function_call", '{"place": "sky"}'),
        ]
    )
    assert whole.tools[0].name == "look"


async def test_a_call_that_is_cut_off_is_incomplete(gateway_app):
    gateway_app.engine.reply = lambda sent: CALLS
    answer = await create(gateway_app, tools=[LOOSE], max_output_tokens=CALLS.index("sea"))
    assert [item.status for item in answer.output] == ["completed", "incomplete"]
    assert answer.output[1].arguments == '{"place": "'


async def test_one_call_where_several_are_not_wanted(gateway_app):
    gateway_app.engine.reply = lambda sent: CALLS
    answer = await create(gateway_app, tools=[LOOSE], parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["message", "function_call"]
    assert answer.parallel_tool_calls is False


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_has_to_be_made(gateway_app, choice, stream):
    nonsense(gateway_app)
    options = {"tools": [LOOK], "tool_choice": choice}
    answer = (await events_of(gateway_app, **options))[-1].response if stream else await create(gateway_app, **options)
    assert {item.type for item in answer.output} == {"function_call"}
    assert list(json.loads(answer.output[0].arguments)) == ["place"]


def nonsense(gateway_app):
    """The engine answers nonsense, as far as it is let."""
    backend = tiny_tokenizer()._backend
    gateway_app.engine.reply = lambda sent: walk(sent.params.grammar, backend, sent.params.seed)


async def test_no_tools_are_offered_if_none_may_be_called(gateway_app):
    gateway_app.engine.reply = lambda sent: CALLS
    answer = await create(gateway_app, tools=[LOOK], tool_choice="none")
    assert (answer.output_text, answer.tool_choice) == (CALLS, "none")
    assert "look" not in prompt(gateway_app)


async def test_a_json_schema(gateway_app):
    nonsense(gateway_app)
    schema = {"type": "object", "properties": {"color": {"enum": ["red"]}}, "required": ["color"]}
    wanted = {"type": "json_schema", "name": "x", "schema": schema | {"additionalProperties": False}, "strict": True}
    answer = await create(gateway_app, text={"format": wanted})
    assert json.loads(answer.output_text) == {"color": "red"}
    assert answer.text.format.to_dict() == wanted


async def test_a_json_object(gateway_app):
    await create(gateway_app, text={"format": {"type": "json_object"}})
    assert gateway_app.engine.requests[0].params.grammar.kind is GrammarKind.JSON_SCHEMA


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities(gateway_app, stream):
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if stream:
        events = await events_of(gateway_app, **options)
        entries = [entry for event in events if event.type.endswith("text.delta") for entry in event.logprobs]
        part = events[-1].response.output[0].content[0]
        assert [entry.token for entry in part.logprobs] == list(HELLO)
    else:
        entries = (await create(gateway_app, **options)).output[0].content[0].logprobs
    assert [(entry.token, len(entry.top_logprobs)) for entry in entries] == [(letter, 2) for letter in HELLO]


async def test_log_probabilities_of_calls_belong_to_no_message(gateway_app):
    gateway_app.engine.reply = lambda sent: CALLS
    answer = await create(gateway_app, tools=[LOOSE], include=["message.output_text.logprobs"])
    streamed = (await events_of(gateway_app, tools=[LOOSE], include=["message.output_text.logprobs"]))[-1].response
    for response in (answer, streamed):
        assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    told = "".join(entry.token for entry in streamed.output[0].content[0].logprobs)
    assert told.startswith("So:") and "name" not in told


ITEMS = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
    {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "So:", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": '{"place": "sea"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "blue"},
    {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "wide"}]},
]


async def test_items_are_a_chat(gateway_app):
    await create(gateway_app, input=ITEMS, instructions="You are a pirate.")
    text = prompt(gateway_app)
    assert text.startswith("<|system|>You are a pirate.<|end|><|system|>Be brief.<|end|><|user|>Where?<|end|>")
    call = '{"name": "look", "arguments": {"place": "sea"}}'
    assert f"<|assistant|>So:{call}<|end|><|tool|>blue<|end|><|tool|>wide<|end|><|assistant|>" in text


async def test_an_image_in_a_result_ends_no_session(gateway_app):
    """Codex sends the images that it has looked at again with each request."""
    seen = [{"type": "input_text", "text": "a.png"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": seen}
    assert (await post(gateway_app, input=[ITEMS[1], call, result])).status_code == 200
    assert re.search(r"<\|tool\|>a\.png\n\[.*reads text only: input_image\]<\|end\|>", prompt(gateway_app))


async def test_an_answers_items_can_be_sent_back(gateway_app):
    gateway_app.engine.reply = lambda sent: CALLS
    answer = await create(gateway_app, tools=[LOOSE])
    back = [item.to_dict() for item in answer.output]
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "x"} for item in answer.output[1:]]
    gateway_app.engine.reply = lambda sent: HELLO
    again = await create(gateway_app, tools=[LOOSE], input=[ITEMS[1], *back, *results])
    assert again.output_text == HELLO


SKIPPED = [
    {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [{"type": "function", "name": "wait"}]},
    {"type": "web_search", "external_web_access": False, "search_context_size": "low"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}, "parameters": "none"},
]


async def test_tools_that_no_model_can_call_are_skipped_and_named(gateway_app):
    """Codex, as it is installed, offers such tools beside its functions."""
    gateway_app.engine.reply = lambda sent: CALLS
    fields = {"tools": [SKIPPED[0], LOOSE, *SKIPPED[1:]], "client_metadata": {"x": "y"}}
    parse(json.dumps(BODY | fields).encode(), "refuse")
    with structlog.testing.capture_logs() as logs:
        answer = (await post(gateway_app, **fields)).json()
    assert [tool["name"] for tool in answer["tools"]] == ["look"]
    assert [item["type"] for item in answer["output"]] == ["message", "function_call", "function_call"]
    [line] = [line for line in logs if line["event"] == "tools_skipped"]
    assert line["tools"] == ["namespace agents", "web_search", "custom apply_patch"]
    assert "agents" not in prompt(gateway_app)


REFUSED = [
    ({"store": True}, "store", "stores no responses"),
    ({"conversation": "conv_1"}, "conversation", "use previous_response_id"),
    ({"background": True}, "background", "stores no responses"),
    ({"truncation": "auto"}, "truncation", "shorten the input"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "instructions"),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "shorten"),
    ({"moderation": {"model": "m"}}, "moderation", "not supported"),
    ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    ({"messages": [{}]}, "messages", "use input"),
    ({"response_format": {"type": "json_object"}}, "response_format", "use text.format"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "/v1/chat/completions"),
    ({"no_stop_trim": True}, "no_stop_trim", "use include_stop_str_in_output"),
    ({"n": 2}, "n", "/v1/chat/completions"),
    ({"tools": [LOOK], "tool_choice": {"type": "file_search"}}, "tool_choice.type", "a choice is a function"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "reads text"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "not supported"),
]
INVALID = [
    ({"input": []}, "input", "empty"),
    ({"input": None}, "input", ""),
    ({"input": [{"role": "user"}]}, "input[0].content", "required"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "unknown role"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "required"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "look"}]}, "input[0].arguments", "required"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "required"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters"),
    ({"tools": [LOOK, LOOK]}, "tools", "one name"),
    ({"tools": [LOOK, {**LOOK, "type": "functions"}]}, "tools[1].type", "did you mean 'function'"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [LOOK], "tool_choice": {"type": "function"}}, "tool_choice.name", "tool_choice.name is required"),
    ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "none of the tools"),
    ({"tools": [{**LOOK, "parameters": {"uniqueItems": True}}]}, "tools[0].parameters", "tools[0].parameters cannot"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "required"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema", "needs type json_schema"),
    ({"input": [""] * (MOST_VALUES + 1)}, "input", f"more than {MOST_VALUES}"),
    ({"tools": [""] * (MOST_VALUES + 1)}, "tools", f"more than {MOST_VALUES}"),
    ({"text": {"format": {"type": "json_schema", "schema": {"uniqueItems": True}}}}, "text.format", "text.format"),
    ({"max_output_token": 3}, "max_output_token", "did you mean 'max_output_tokens'"),
    ({"max_output_tokens": 0}, "max_output_tokens", ""),
    ({"temperature": 3}, "temperature", ""),
    ({"include": ["nothing"]}, "include[0]", ""),
    ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", ""),
    ({"metadata": {"a": "x" * 513}}, "metadata", ""),
    ({"service_tier": "unknown"}, "service_tier", ""),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=str)
async def test_what_is_not_supported_is_refused_by_name(gateway_app, fields, param, words):
    await check_refused(gateway_app, fields, "unsupported_parameter", param, words)


@pytest.mark.parametrize(("fields", "param", "words"), INVALID, ids=lambda value: str(value)[:80])
async def test_what_is_invalid_is_named(gateway_app, fields, param, words):
    await check_refused(gateway_app, fields, None, param, words)


async def check_refused(gateway_app, fields, code, param, words):
    for stream in (False, True):
        response = await post(gateway_app, **{"stream": stream} | fields)
        error = response.json()["error"]
        found = error["param"] if not param.startswith("metadata") else error["param"][: len(param)]
        assert (response.status_code, found) == (400, param), error
        assert error["code"] == code if code else error["code"] != "unsupported_parameter"
        assert words in error["message"]
    assert (gateway_app.engine.requests, gateway_app.limiter.reserved_tokens) == ([], 0)


async def test_a_request_refused_after_tokenizing_counts(gateway_app):
    unusable = {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"uniqueItems": True}}}}
    for _ in range(3):
        assert (await post(gateway_app, "sk-globex", **unusable)).status_code == 400
    response = await post(gateway_app, "sk-globex")
    assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_options_of_a_stream_need_a_stream(gateway_app):
    error = (await post(gateway_app, stream_options={"include_obfuscation": False})).json()["error"]
    assert error["param"] == "stream_options"
    events = await events_of(gateway_app, stream_options={"include_obfuscation": False})
    assert events[-1].type == "response.completed"


async def test_what_has_no_effect_is_accepted(gateway_app):
    fields = {"store": False, "user": "me", "reasoning": {"effort": "low"}, "background": False, "n": 1, "seed": None}
    more = {"max_tool_calls": 3, "include": ["reasoning.encrypted_content"], "truncation": "disabled", "unknown": 1}
    response = await post(gateway_app, **fields, **more, text={"verbosity": "low"})
    assert (response.status_code, response.json()["store"]) == (200, False)


async def test_an_input_that_is_too_long_is_named(gateway_app):
    response = await post(gateway_app, input="x" * 3000)
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("context_length_exceeded", "input")


async def test_errors_are_those_of_openais_client(gateway_app):
    async with gateway_app.openai("sk-globex") as client:
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="poet", input="hi")
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model="pirate", input="hi", max_output_tokens=1000)


async def test_a_stream_that_fails(gateway_app):
    gateway_app.engine.fail_after = 4
    events = await events_of(gateway_app)
    last, told = events[-1], [event.delta for event in events if event.type == "response.output_text.delta"]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "engine_unavailable"
    assert (last.response.output_text, last.response.output[0].status) == ("".join(told), "incomplete")
    assert 0 < len(told) < len(HELLO)


async def test_a_bug_in_the_middle_of_a_stream_tells_no_internals(gateway_app, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("gateway.responses.items.OutputItems.add_text", broken)
    *_, last = await events_of(gateway_app)
    assert (last.type, last.response.error.code) == ("response.failed", "internal_error")
    assert "secret" not in last.to_json()


async def test_the_client_parses_streams_and_schemas_itself(gateway_app):
    gateway_app.engine.reply = lambda sent: CALLS
    async with gateway_app.openai() as client, client.responses.stream(**BODY, tools=[LOOSE]) as stream:
        snapshots = [event.snapshot async for event in stream if event.type.endswith("arguments.delta")]
        answer = await stream.get_final_response()
    assert snapshots[-1] == '{"place": "sky"}'
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]


async def test_what_is_charged_is_what_is_used(gateway_app):
    answer = await create(gateway_app, max_output_tokens=50)
    [asked] = gateway_app.limiter.reserved
    assert asked.tokens == answer.usage.input_tokens + 50
    assert list(gateway_app.limiter.ends.values()) == [[answer.usage.total_tokens]]
    assert answer.usage.output_tokens == len(ids_of(HELLO)) + 1
