import json
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core.messages.requests import Lane
from gateway.api_schema.chats import ChatRequest, CompletionRequest
from gateway.api_schema.tokens import TokenizeRequest
from gateway.core.errors import ApiError
from gateway.core.json_bounds import INTEGERS_PER_VALUE, MOST_VALUES
from gateway.openai.convert import chat_request, completion_request
from gateway.openai.parse import parse
from gateway.openai.refused_fields import REFUSED
from gateway.requests.types import Chat
from tests.examples import examples

USER = {"role": "user", "content": "hi"}
REFUSAL = {"type": "refusal", "refusal": "no"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def deep(levels):
    return [deep(levels - 1)] if levels else []


def calling(arguments):
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def chat(**fields):
    body = {"model": "m", "messages": [USER], **fields}
    return chat_request(parse(json.dumps(body).encode(), ChatRequest), "req")


def completion(**fields):
    body = {"model": "m", "prompt": "hi", **fields}
    return completion_request(parse(json.dumps(body).encode(), CompletionRequest), "req")


def refusal(make, **fields):
    with pytest.raises(ApiError) as caught:
        make(**fields)
    return caught.value


def test_defaults_are_openais():
    request = chat()
    assert (request.max_tokens, request.n, request.seed, request.lane, request.stop) == (None, 1, None, None, ())
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.logprobs) == (1.0, 1.0, None)
    assert completion().default_max_tokens == 16


def test_arguments_of_calls_are_objects_until_they_have_too_many_values_together():
    """Their texts are no values of the body."""
    calls = calling(json.dumps({"a": [[]] * (MOST_VALUES // 4)}))["tool_calls"] * 4
    [message] = chat(messages=[{"role": "assistant", "tool_calls": calls}]).prompts[0].messages
    kinds = [type(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert kinds == [dict, str, str, str]


def test_everything_arrives():
    request = chat(
        max_tokens=9,
        max_completion_tokens=5,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "6": 1.5},
        seed=-3,
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=4,
        service_tier="flex",
        priority=-4,
        n=3,
        adapter_id="x",
        user="alice",
        metadata={"a": "b"},
        something_new={"deep": [1]},
    )
    sampling = request.sampling
    assert (request.max_tokens, request.reserve_tokens) == (5, 9)
    assert (request.seed, request.stop, request.lane, request.priority, request.n) == (
        -3,
        ("a", "b"),
        Lane.BATCH,
        -4,
        3,
    )
    assert request.model.adapter_id == "x"
    assert (sampling.min_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (2, 0.0, 0.5, 7)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -2.0, 2.0)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, ((5, -100.0), (6, 1.5)))
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.logprobs) == ((7,), True, 4)


def test_goals_are_milliseconds_on_the_wire_and_seconds_within():
    for make in (chat, completion):
        asked = make(slo={"ttft_ms": 250, "itl_ms": 62.5})
        assert (asked.ttft, asked.itl) == (0.25, 0.0625)
        one = make(slo={"itl_ms": 40, "something_new": 1})
        assert (one.ttft, one.itl) == (None, 0.04)
        for nothing in (None, {}):
            assert make(slo=nothing) == make()


@pytest.mark.parametrize("field", ["ttft_ms", "itl_ms"])
@pytest.mark.parametrize("value", [0, -1, "fast", 86_400_001, True])
def test_goals_out_of_range_are_refused_by_name(field, value):
    error = refusal(chat, slo={field: value})
    assert (error.http_status, error.param) == (400, f"slo.{field}")


def test_time_limits_are_seconds():
    for make in (chat, completion):
        asked = make(timeout=2.5, stall_timeout=1)
        assert (asked.deadline, asked.stall) == (2.5, 1.0)
        assert make(timeout=None, stall_timeout=None) == make()
        assert (make().deadline, make().stall) == (None, None)


@pytest.mark.parametrize("field", ["timeout", "stall_timeout"])
@pytest.mark.parametrize("value", [0, -1, "5", 86_401, True])
def test_time_limits_out_of_range_are_refused_by_name(field, value):
    error = refusal(completion, **{field: value})
    assert (error.http_status, error.param) == (400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{"role": "user", "content": ""}] * (MOST_VALUES // 3 + 1)),
        ("messages", [{"role": "user", "content": [{}] * MOST_VALUES}]),
        ("tools", ["a"] * (MOST_VALUES + 1)),
        ("stop_token_ids", [0] * (MOST_VALUES * INTEGERS_PER_VALUE + MOST_VALUES)),
    ],
)
@pytest.mark.parametrize("kind", [ChatRequest, TokenizeRequest])
def test_bodies_have_a_bounded_number_of_values(kind, field, value):
    with pytest.raises(ApiError, match=f"the body has more than {MOST_VALUES} lists, objects and members") as refused:
        parse(json.dumps({"model": "m", field: value}, separators=(",", ":")).encode(), kind)
    assert refused.value.param == (field if field in kind.__struct_fields__ else None)


def test_a_salt_is_a_text_that_is_not_empty():
    for make in (chat, completion):
        assert make(cache_salt="s\u00e4lt").cache_salt == "s\u00e4lt"
        assert make(cache_salt=None) == make()
        for value in ("", 5, ["s"], "x" * 1025):
            error = refusal(make, cache_salt=value)
            assert (error.http_status, error.param) == (400, "cache_salt")


def test_speculation_is_auto_or_off():
    for make in (chat, completion):
        assert make().speculates and make(speculation="auto").speculates and not make(speculation="off").speculates
        for value in ("always", True, 5):
            error = refusal(make, speculation=value)
            assert (error.http_status, error.param) == (400, "speculation")


def test_a_prediction_is_a_text_or_has_text_parts():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(prediction={"type": "content", "content": "one"}).prediction == "one"
    assert chat(prediction={"type": "content", "content": parts}).prediction == "one\ntwo"
    assert chat(prediction=None) == chat()
    image = {"type": "content", "content": [{"type": "image_url"}]}
    assert refusal(chat, prediction=image).param == "prediction.content[0].type"
    assert refusal(chat, prediction={"type": "diff", "content": "x"}).param == "prediction.type"
    assert refusal(chat, prediction={"type": "content"}).param == "prediction.content"
    assert refusal(completion, prediction={"type": "content", "content": "x"}).param == "prediction"


def test_text_parts_are_joined_and_developers_are_systems():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = chat(messages=[{"role": "developer", "content": parts}, {"role": "assistant", "content": None}])
    expected = ({"role": "system", "content": "one\ntwo"}, {"role": "assistant", "content": ""})
    assert request.prompts == (Chat(expected),)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", ("one",)),
        (["one", "two"], ("one", "two")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompts_come_in_four_shapes(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], ["one", 2], [1, [2]], [1.5], {"text": "one"}, None])
def test_other_prompts_are_refused(prompt):
    error = refusal(completion, prompt=prompt)
    assert (error.http_status, error.code) == (400, None)
    assert error.param.startswith("prompt")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 5e-324),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", 10.1),
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_completion_tokens", -1),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 129),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"five": 1}),
        ("seed", 2**63),
        ("stop", 5),
        ("stop_token_ids", "x"),
        ("top_logprobs", 21),
        ("priority", 2**31),
        ("model", None),
        ("messages", "hi"),
        ("service_tier", "vip"),
        ("slo", "fast"),
        ("stream", "yes"),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    error = refusal(chat, **{field: value})
    assert (error.http_status, error.code, error.param) == (400, None, field)
    assert error.body()["error"]["code"]
    assert field in error.message
    assert isinstance(value, dict) or value is None or json.dumps(value).strip('"') in error.message


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"temperature": "hot"}, "invalid_type", 'temperature: Expected `float | null`, got `str`: "hot"'),
        ({"temperature": 2.1}, "decimal_above_max_value", "temperature: Expected `float` <= 2.0, got 2.1"),
        ({"presence_penalty": -3}, "decimal_below_min_value", "presence_penalty: Expected `float` >= -2.0, got -3"),
        ({"max_tokens": 0}, "integer_below_min_value", "max_tokens: Expected `int` >= 1, got 0"),
        ({"n": 129}, "integer_above_max_value", "n: Expected `int` <= 128, got 129"),
        ({"cache_salt": ""}, "string_below_min_length", 'cache_salt: Expected `str` of length >= 1, got ""'),
        ({"cache_salt": "x" * 1025}, "string_above_max_length", "cache_salt: Expected `str` of length <= 1024"),
        ({"speculation": "always"}, "invalid_value", "speculation: Invalid enum value 'always'"),
        ({"service_tier": "vip"}, "invalid_value", "not 'vip'"),
        ({"reasoning_effort": "huge"}, "invalid_value", "the effort must be one of none"),
        ({"stop": ["a", 5]}, "invalid_type", "stop[1]: Expected `str`, got `int`: 5"),
        ({"messages": [{}]}, "missing_required_parameter", "messages[0].role is required"),
        ({"messages": []}, "empty_array", "messages must not be empty"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "invalid_value", "unknown role 'wizard'"),
        ({"temprature": 1}, "unknown_parameter", "did you mean 'temperature'"),
        ({"logit_bias": {"5": 1, "7": 101}}, "decimal_above_max_value", 'logit_bias["7"]: Expected `float` <= 100'),
        ({"logit_bias": {"5": 1, "five": 1, "7": 2}}, "invalid_type", 'logit_bias["five"]: Expected `int`, got `str`'),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, "invalid_type", "tools[0].function.name: "),
    ],
)  # fmt: skip
def test_errors_have_openais_codes_and_name_what_does_not_fit(fields, code, message):
    error = refusal(chat, **fields)
    assert (error.http_status, error.body()["error"]["code"]) == (400, code)
    assert message in error.message


def test_a_wrong_member_among_many_is_found():
    members = {str(number): 1 for number in range(5000)} | {"4321": 101}
    assert 'logit_bias["4321"]' in refusal(chat, logit_bias=members).message


def test_missing_fields_are_named():
    with pytest.raises(ApiError, match="messages is required") as caught:
        parse(b'{"model":"m"}', ChatRequest)
    assert caught.value.param == "messages"
    assert refusal(chat, messages=[{"content": "hi"}]).param == "messages[0].role"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_answer_is_refused_by_name(name):
    make = completion if name in ChatRequest.__struct_fields__ else chat
    error = refusal(make, **{name: {"type": "json_object"}})
    assert (error.http_status, error.code, error.param) == (400, "unsupported_parameter", name)
    for harmless in REFUSED[name].harmless:
        assert make(**{name: harmless}) == make()


def test_a_sentence_stands_for_what_is_no_text_in_a_tools_result():
    parts = [{"type": "text", "text": "a.png"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    told = (
        chat(messages=[{"role": "tool", "tool_call_id": "call_1", "content": parts}]).prompts[0].messages[0]["content"]
    )
    assert told.startswith("a.png\n[") and told.endswith("reads text only: image_url]")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "name": "f", "content": "4"}, "messages[0].role"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
    ],
)
def test_messages_that_are_not_text_are_refused_by_name(message, param):
    error = refusal(chat, messages=[message])
    assert (error.code, error.param) == ("unsupported_parameter", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 3}, "best_of"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "messages[0].content[0].refusal"),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
            "messages[0].content[0].type",
        ),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"long": "x" * 20_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"deep": deep(200)}}, "chat_template_kwargs"),
        ({"messages": [{**calling("{}"), "role": "user", "content": "x"}]}, "messages[0].tool_calls"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "has space"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields, param):
    error = refusal(chat, **fields)
    assert (error.http_status, error.param) == (400, param)


def test_tools_and_their_calls_become_what_templates_read():
    messages = [calling('{"place": "sea"}'), {"role": "tool", "tool_call_id": "call_1", "content": "blue"}]
    [prompt] = chat(messages=messages, tools=[TOOL], tool_choice="auto").prompts
    called = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"place": "sea"}}}
    assert prompt.messages == (
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "blue", "tool_call_id": "call_1"},
    )
    [tool] = prompt.tools
    assert tool == TOOL
    assert chat(tools=[TOOL], tool_choice="none").prompts[0].tools == ()


def test_no_tokens_at_all_are_for_echoes():
    error = refusal(completion, max_tokens=0)
    assert (error.http_status, error.param) == (400, "max_tokens")
    assert completion(max_tokens=0, echo=True).max_tokens == 0
    assert refusal(completion, max_tokens=-1, echo=True).param == "max_tokens"
    assert completion(max_tokens=0, prompt_logprobs=1).max_tokens == 0


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({}, None),
        ({"echo": True}, None),
        ({"logprobs": 3}, None),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 1}, 3),
        ({"logprobs": 3, "prompt_logprobs": 1}, 1),
    ],
)
def test_an_echo_with_logprobs_asks_for_those_of_the_prompt(fields, width):
    sampling = completion(**fields).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (fields.get("logprobs"), width)
    assert chat(prompt_logprobs=width).sampling.prompt_logprobs == width


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"{}x", b'{"model": NaN}', b'{"model": "\\ud800"}'],
)
def test_malformed_json_has_a_code_of_its_own(body):
    with pytest.raises(ApiError) as caught:
        parse(body, ChatRequest)
    assert (caught.value.http_status, caught.value.code) == (400, "invalid_json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*ChatRequest.__struct_fields__, *REFUSED]), json_values, max_size=6))
def test_any_json_is_understood_or_refused(fields):
    for make in (chat, completion):
        with suppress(ApiError):
            assert make(**fields).prompts
