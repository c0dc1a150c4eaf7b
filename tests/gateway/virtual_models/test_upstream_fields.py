"""Every field of a body is sent to the upstream that answers, is refused by its name, or stays here for a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.anthropic.calls import message_call
from gateway.api_schema.chats import ChatRequest, CompletionRequest
from gateway.api_schema.vectors import EmbeddingsRequest
from gateway.core.errors import ApiError, Fault
from gateway.core.tenants import Tenant
from gateway.embeddings.parse import embeddings_request
from gateway.embeddings.parse import parse as parse_pooled
from gateway.openai.convert import chat_request, completion_request
from gateway.openai.parse import parse
from gateway.upstreams import bodies, vectors

Json = dict[str, Any]

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
ASKED = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
SHAPES = {
    **ASKED,
    "structured_outputs": {"json": SCHEMA},
    "guided_json": SCHEMA,
    "json_schema": SCHEMA,
    "format": SCHEMA,
}
"""Ways to ask for an answer of a schema, which chats of upstreams know and completions do not."""

SENT_BY_ALL = {
    "model": ("m", {"model": "big-1"}),
    "temperature": (1.0, {"temperature": 1.0}),
    "top_p": (1.0, {"top_p": 1.0}),
    "top_k": (0, {"top_k": -1}),
    "min_p": (0.0, {"min_p": 0.0}),
    "presence_penalty": (0.5, {"presence_penalty": 0.5}),
    "frequency_penalty": (0.5, {"frequency_penalty": 0.5}),
    "repetition_penalty": (1.0, {"repetition_penalty": 1.0}),
    "repeat_penalty": (1.1, {"repetition_penalty": 1.1}),
    "seed": (0, {"seed": 0}),
    "stop": ("x", {"stop": ["x"]}),
    "n": (2, {"n": 2}),
    "max_tokens": (9, {"max_tokens": 9}),
    "add_special_tokens": (False, {"add_special_tokens": False}),
}
"""Fields of chats and completions, with a value and what the upstream gets for it: also where the value is a default
here, because the upstream's model may have another one."""
REFUSED_BY_ALL = {
    "logit_bias": {"5": 1},
    "min_tokens": 2,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "allowed_token_ids": [5],
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": "start: A",
    "regex": "a+",
    "ebnf": "root ::= A",
    "grammar": "root ::= A",
    "truncate_prompt_tokens": 5,
    "return_token_ids": True,
    "prompt_logprobs": 1,
    "best_of": 2,
}
NAMES_AND_LANES = {
    "adapter_id": "refused beside a virtual model, whose members are the only way to an upstream",
    "lora_path": "as adapter_id",
    "priority": "orders requests of this gateway",
    "request_class": "shares this gateway's lanes",
    "service_tier": "chooses this gateway's lane",
    "slo": "orders requests of this gateway",
    "timeout": "the gateway ends the request",
    "stall_timeout": "the gateway ends the request",
    "cache_salt": "changes no answer",
    "speculation": "changes no answer",
}
STAYS = NAMES_AND_LANES | {
    "stream": "the gateway streams every answer from the upstream",
    "stream_options": "the gateway writes the chunk with the usage; `continuous_usage_stats` is refused (see below)",
    "truncation_side": "has no effect without truncate_prompt_tokens",
    "return_tokens_as_token_ids": "names tokens of log probabilities, which are refused",
}

CHAT = (
    {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    SENT_BY_ALL
    | {name: (value, {"response_format": FORMAT}) for name, value in SHAPES.items()}
    | {
        "messages": ([{"role": "user", "content": "a"}], {"messages": [{"role": "user", "content": "a"}]}),
        "max_completion_tokens": (9, {"max_tokens": 9}),
        "add_generation_prompt": (False, {"add_generation_prompt": False}),
        "chat_template_kwargs": ({"a": 1}, {"chat_template_kwargs": {"a": 1}}),
        "reasoning_effort": ("none", {"reasoning_effort": "none"}),
        "reasoning": ({"enabled": False}, {"reasoning_effort": "none"}),
        "tools": ([TOOL], {"tools": [TOOL], "tool_choice": "auto"}),
    },
    REFUSED_BY_ALL | {"continue_final_message": True, "thinking_token_budget": 5, "logprobs": True},
    STAYS
    | {
        "tool_choice": "sent with tools (see below)",
        "parallel_tool_calls": "sent with tools (see below)",
        "top_logprobs": "has no effect without logprobs",
        "prediction": "changes no answer",
    },
)
COMPLETION = (
    {"model": "m", "prompt": "hi"},
    SENT_BY_ALL | {"prompt": (["a", "b"], {"prompt": ["a", "b"]})},
    REFUSED_BY_ALL | SHAPES | {"logprobs": 1},
    STAYS | {"echo": "the gateway puts the prompt, which is a text, before the answer"},
)
EMBEDDINGS = (
    {"model": "m", "input": "hi"},
    {
        "model": ("m", {"model": "big-1"}),
        "input": (["a", "b"], {"input": ["a", "b"]}),
        "dimensions": (3, {"dimensions": 3}),
        "normalize": (False, {"normalize": False}),
        "add_special_tokens": (False, {"add_special_tokens": False}),
    },
    {"pooling": "last", "truncate_prompt_tokens": 5},
    NAMES_AND_LANES
    | {
        "encoding_format": "the gateway encodes the vectors",
        "truncation_side": "has no effect without truncate_prompt_tokens",
    },
)
TABLES = {ChatRequest: CHAT, CompletionRequest: COMPLETION, EmbeddingsRequest: EMBEDDINGS}


def sent(kind: type, fields: Json) -> Json:
    """Return the body that an upstream gets for a body of a struct's kind. Raises what the gateway raises before."""
    text = json.dumps(TABLES[kind][0] | fields).encode()
    if kind is EmbeddingsRequest:
        request = embeddings_request(parse_pooled(text, EmbeddingsRequest), "id")
    else:
        convert: Any = chat_request if kind is ChatRequest else completion_request
        request = convert(parse(text, kind), "id")
    bodies.check(request)
    return (vectors if kind is EmbeddingsRequest else bodies).body_of(request, "big-1")


def refused_field(kind: type, fields: Json) -> str | None:
    with pytest.raises(ApiError) as caught:
        sent(kind, fields)
    assert caught.value.fault is Fault.UNSUPPORTED_PARAMETER
    return caught.value.param


@pytest.mark.parametrize("kind", TABLES)
def test_every_field_has_its_place(kind):
    _, told, refused, stays = TABLES[kind]
    assert sorted([*told, *refused, *stays]) == sorted(kind.__struct_fields__)


@pytest.mark.parametrize(
    ("kind", "name", "value", "wanted"),
    [(kind, name, *pair) for kind, (_, told, _, _) in TABLES.items() for name, pair in told.items()],
)
def test_what_changes_the_answer_is_sent(kind, name, value, wanted):
    assert sent(kind, {name: value}).items() >= wanted.items()


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind, (_, _, refused, _) in TABLES.items() for name, value in refused.items()],
)
def test_what_cannot_be_sent_is_refused_by_its_name(kind, name, value):
    assert (refused_field(kind, {name: value}) or "").partition(".")[0] == name


def test_parts_of_fields_are_sent_or_refused_too():
    usage = {"include_usage": True, "continuous_usage_stats": True}
    assert refused_field(ChatRequest, {"stream": True, "stream_options": usage}) == (
        "stream_options.continuous_usage_stats"
    )
    assert refused_field(ChatRequest, {"reasoning": {"max_tokens": 5}}) == "thinking_token_budget"
    chosen = sent(ChatRequest, {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False})
    assert (chosen["tool_choice"], chosen["parallel_tool_calls"]) == ("required", False)
    contrary = {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}
    assert sent(ChatRequest, contrary).items() >= contrary.items(), "as the caller wrote it"
    assert "reasoning_effort" not in sent(ChatRequest, {"chat_template_kwargs": {"reasoning_effort": "high"}})
    assert sent(ChatRequest, {"reasoning": {"enabled": True}}) == sent(ChatRequest, {})


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "disabled"}}, {}),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, {}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
    ],
    ids=["as the model likes", "effort", "off", "off with an effort", "max"],
)
def test_what_messages_say_of_reasoning_is_sent_as_an_effort_alone(fields, wanted):
    """OpenAI's servers refuse template variables, and Claude Code always asks for adaptive thinking."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    call = [message_call(None, Tenant("acme"), json.dumps(body | more).encode(), "id") for more in ({}, fields)]
    plain, asked = (bodies.body_of(one.request, "big-1") for one in call)
    assert {name: value for name, value in asked.items() if plain.get(name) != value} == wanted


def test_what_nobody_set_is_not_sent():
    """Many servers refuse fields that they do not know, and OpenAI's newest models a temperature."""
    plain = {"model": "big-1", "stream": True, "stream_options": {"include_usage": True}}
    assert sent(ChatRequest, {}) == plain | {"messages": CHAT[0]["messages"]}
    assert sent(CompletionRequest, {}) == plain | {"prompt": "hi", "max_tokens": 16}
    assert sent(ChatRequest, {"top_p": 0}).keys() - sent(ChatRequest, {}).keys() == {"temperature"}
