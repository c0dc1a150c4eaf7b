"""Every field in the public documentation of vLLM, SGLang, llama.cpp and Ollama works, is refused by name, or is listed
as one that changes no answer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from gateway.anthropic.parse import HARMLESS
from gateway.anthropic.parse import parse as parse_message
from gateway.anthropic.schema import MessagesRequest
from gateway.api_schema.chats import ChatRequest, CompletionRequest
from gateway.api_schema.tokens import TokenizeRequest
from gateway.api_schema.vectors import EmbeddingsRequest
from gateway.core.errors import ApiError
from gateway.embeddings.parse import parse as parse_pooled
from gateway.embeddings.refused_fields import NO_EFFECT as POOLED_NO_EFFECT
from gateway.openai.convert import chat_request, completion_request
from gateway.openai.parse import parse
from gateway.openai.refused_fields import NO_EFFECT, REFUSED
from gateway.openai.unknown import OPENAI
from gateway.responses.calls import response_request
from gateway.responses.parse import parse as parse_response
from gateway.responses.schema import NO_EFFECT as RESPONSES_NO_EFFECT
from gateway.responses.schema import ResponsesRequest

PEERS = json.loads(Path(__file__).with_name("peer_fields.json").read_text())
ROUTES_OF_PEERS = [(server, route) for server, routes in PEERS.items() for route in routes]
TELLING = {"no server": ["knows this value"]}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}

Parser = Callable[[bytes], Any]
ROUTES: dict[str, tuple[type[Struct], Parser, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, lambda body: parse(body, ChatRequest), MESSAGES),
    "/v1/completions": (CompletionRequest, lambda body: parse(body, CompletionRequest), {"prompt": "hi"}),
    "/v1/responses": (ResponsesRequest, parse_response, {"input": "hi"}),
    "/v1/messages": (MessagesRequest, lambda body: parse_message(body, MessagesRequest), MESSAGES | {"max_tokens": 5}),
    "/v1/embeddings": (EmbeddingsRequest, lambda body: parse_pooled(body, EmbeddingsRequest), {"input": "hi"}),
    "/tokenize": (TokenizeRequest, lambda body: parse(body, TokenizeRequest), {"prompt": "hi"}),
}
LISTED = NO_EFFECT | OPENAI | HARMLESS | POOLED_NO_EFFECT | RESPONSES_NO_EFFECT


def outcome(route: str, name: str) -> str:
    kind, parse_body, least = ROUTES[route]
    if name in kind.__struct_fields__:
        return "works"
    try:
        parse_body(json.dumps({"model": "m", **least, name: TELLING}).encode())
    except ApiError as error:
        return "refused" if (error.code, error.param) == ("unsupported_parameter", name) else f"{error}"
    return "no effect" if name in LISTED else "lost"


@pytest.mark.parametrize(("server", "route"), ROUTES_OF_PEERS)
def test_no_documented_field_of_a_peer_is_lost(server, route):
    outcomes = {name: outcome(route, name) for name in PEERS[server][route].split()}
    assert {name: end for name, end in outcomes.items() if end not in ("works", "refused", "no effect")} == {}


def test_no_field_is_both_refused_and_without_effect():
    assert not REFUSED.keys() & NO_EFFECT


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SHAPED: dict[str, Any] = {
    "adapter_id": "a", "lora_path": "a", "priority": 1, "request_class": "c", "slo": {"itl_ms": 5}, "timeout": 5,
    "stall_timeout": 5, "cache_salt": "s", "speculation": "off", "min_tokens": 1, "top_k": 5, "min_p": 0.5,
    "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.1, "repeat_penalty": 1.1,
    "logit_bias": {"5": 1}, "seed": 5,
    "stop": "s", "stop_token_ids": [5], "allowed_token_ids": [5],
    "include_stop_str_in_output": True, "ignore_eos": True,
    "structured_outputs": {"regex": "a"}, "guided_json": SCHEMA, "guided_regex": "a", "guided_choice": ["a"],
    "guided_grammar": "start: a", "json_schema": SCHEMA, "regex": "a", "ebnf": 'root ::= "a"',
    "grammar": 'root ::= "a"', "format": "json", "model": "n", "temperature": 0.5, "top_p": 0.5, "stream": True,
    "service_tier": "flex",
}  # fmt: skip
"""A value of each field that chats, completions and responses have in common, which differs from the default."""
SAMPLED: dict[str, Any] = {
    **SHAPED, "max_tokens": 5, "n": 2, "truncate_prompt_tokens": 5,
    "prompt_logprobs": 1, "response_format": {"type": "json_object"}, "logprobs": 1,
}  # fmt: skip
CHAT = {
    **SAMPLED, "messages": [{"role": "user", "content": "ho"}], "max_completion_tokens": 5,
    "add_generation_prompt": False, "continue_final_message": True, "chat_template_kwargs": {"x": 1},
    "reasoning_effort": "low", "reasoning": {"effort": "low"}, "thinking_token_budget": 5,
    "prediction": {"type": "content", "content": "x"}, "tools": [TOOL], "logprobs": True,
}  # fmt: skip
RESPONSE = {
    **SHAPED, "input": "ho", "instructions": "be brief", "chat_template_kwargs": {"x": 1}, "max_output_tokens": 5,
    "reasoning": {"effort": "low"}, "thinking_token_budget": 5, "text": {"format": {"type": "json_object"}},
    "tools": [{"type": "function", "name": "f"}], "top_logprobs": 1, "include": ["message.output_text.logprobs"],
}  # fmt: skip
TOGETHER = {"add_special_tokens", "best_of", "truncation_side", "tool_choice", "parallel_tool_calls", "top_logprobs"}
"""Fields that have an effect beside others, which other tests send."""
SHOWN = {
    "return_token_ids", "return_tokens_as_token_ids", "stream_options", "echo", "store", "background", "metadata",
    "previous_response_id",
}  # fmt: skip
"""Fields that change how an answer is shown or kept, and not the request."""
WHOLE = {
    "/v1/chat/completions": (lambda body: chat_request(parse(body, ChatRequest), "r"), CHAT, MESSAGES),
    "/v1/completions": (
        lambda body: completion_request(parse(body, CompletionRequest), "r"),
        SAMPLED | {"prompt": "ho"},
        {"prompt": "hi"},
    ),
    "/v1/responses": (lambda body: response_request(parse_response(body), "r"), RESPONSE, {"input": "hi"}),
}


@pytest.mark.parametrize("route", WHOLE)
def test_every_field_of_a_schema_changes_the_request(route):
    make, values, least = WHOLE[route]
    assert {*ROUTES[route][0].__struct_fields__} - TOGETHER - SHOWN == {*values} - TOGETHER
    same = [name for name, value in values.items() if _made(make, least, name, value) == _made(make, least)]
    assert same == []


def _made(make, least, name="model", value="m"):
    return make(json.dumps({"model": "m", **least, name: value}).encode())


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"ebnf": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ({"grammar": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ({"json_schema": json.dumps(SCHEMA)}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}),
        ({"json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        ({"format": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        ({"format": "json"}, {"structured_outputs": {"json_object": True}}),
        ({"grammar": "", "format": "", "n_predict": -1, "mirostat": 0, "typical_p": 1.0, "lora": []}, {}),
    ],
)
def test_grammars_of_other_servers_are_structured_outputs(route, fields, same):
    make, _, least = WHOLE[route]
    one, other = (make(json.dumps({"model": "m", **least, **each}).encode()) for each in (fields, same))
    assert one.sampling == other.sampling


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_format_may_have_its_schema_itself(kind):
    make = WHOLE["/v1/chat/completions"][0]
    formats = {"type": kind, "schema": SCHEMA}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    one, other = (make(json.dumps({"model": "m", **MESSAGES, "response_format": each}).encode()) for each in formats)
    assert one.sampling == other.sampling


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "hi"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ({"messages": [{"role": "user", "content": "hi", "images": ["x"]}]}, "messages[0].images"),
        ({"messages": [{"role": "assistant", "content": "hi", "prefix": True}]}, "messages[0].prefix"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
    ],
)
def test_what_a_chat_cannot_have_is_refused(fields, param):
    with pytest.raises(ApiError) as caught:
        WHOLE["/v1/chat/completions"][0](json.dumps({"model": "m", **MESSAGES, **fields}).encode())
    assert (caught.value.http_status, caught.value.param) == (400, param)


def test_refusals_say_what_to_use():
    with pytest.raises(ApiError, match="max_new_tokens is not supported; use max_tokens"):
        parse(json.dumps({"model": "m", "prompt": "hi", "max_new_tokens": 5}).encode(), CompletionRequest)
