"""What an answer must match: every spelling of it, what is refused by name, and the engine's own refusal."""

import json

import pytest
from fakes import BASE, build_gateway_app
from grpc_app import as_key, ask, open_grpc_app, refused

from engine.core.messages.grammar import Grammar, GrammarKind, allowed_tokens
from engine.core.messages.requests import ErrorCode, FinishReason, Refusal, TokenEvent
from gateway.api_schema.chats import ChatRequest, CompletionRequest
from gateway.core.errors import ApiError, Fault
from gateway.openai.convert import chat_request, completion_request
from gateway.openai.parse import parse
from gateway.pb import generation_pb2 as pb

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"z": {"type": "null"}, "a": {"type": "boolean"}}}
WRITTEN = '{"type":"object","properties":{"z":{"type":"null"},"a":{"type":"boolean"}}}'
ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
NAMED = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True, "description": "d"}}

FORMAT = "response_format.json_schema.schema"

SPELLINGS = [
    ({"response_format": {"type": "text"}}, None, None),
    ({"response_format": None, "structured_outputs": None}, None, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT, "response_format"),
    ({"response_format": NAMED}, Grammar(GrammarKind.JSON_SCHEMA, WRITTEN), "response_format.json_schema.schema"),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar(GrammarKind.JSON_SCHEMA, WRITTEN), "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, Grammar(GrammarKind.JSON_SCHEMA, "{"), "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+"), "structured_outputs.regex"),
    (
        {"structured_outputs": {"grammar": "root ::= x", "json_object": False}},
        Grammar(GrammarKind.CONTEXT_FREE, "root ::= x"),
        "structured_outputs.grammar",
    ),
    (
        {"response_format": {"type": "text"}, "structured_outputs": {"choice": ["yes", 'a "b"\n']}},
        Grammar(GrammarKind.CONTEXT_FREE, 'start: "yes" | "a \\"b\\"\\n"'),
        "structured_outputs.choice",
    ),
    ({"guided_json": SCHEMA}, Grammar(GrammarKind.JSON_SCHEMA, WRITTEN), "guided_json"),
    ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+"), "guided_regex"),
    ({"guided_grammar": "start: x"}, Grammar(GrammarKind.CONTEXT_FREE, "start: x"), "guided_grammar"),
    ({"guided_choice": ["a", "b"]}, Grammar(GrammarKind.CONTEXT_FREE, 'start: "a" | "b"'), "guided_choice"),
    ({"allowed_token_ids": [9, 5, 6, 7, 5]}, allowed_tokens([5, 6, 7, 9]), "allowed_token_ids"),
]
REFUSED = [
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [*range(0, 50_000, 2)]}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "guided_regex": "a"}, "allowed_token_ids"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": NAMED}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
]


@pytest.mark.parametrize(("fields", "grammar", "field"), SPELLINGS)
def test_every_spelling(fields, grammar, field):
    chat, completion = (json.dumps({**least, **fields}).encode() for least in (CHAT, {"model": BASE, "prompt": "hi"}))
    for request in (
        chat_request(parse(chat, ChatRequest), "r"),
        completion_request(parse(completion, CompletionRequest), "r"),
    ):
        assert (request.sampling.grammar, request.grammar_field) == (grammar, field)


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_refused_by_name(fields, param):
    with pytest.raises(ApiError) as caught:
        chat_request(parse(json.dumps({**CHAT, **fields}).encode(), ChatRequest), "r")
    assert caught.value.param == param
    assert caught.value.fault in (Fault.INVALID_REQUEST, Fault.UNSUPPORTED_PARAMETER)


INVALID = TokenEvent("r", finish_reason=FinishReason.ERROR, refusal=Refusal(ErrorCode.INVALID_GRAMMAR, "no such type"))


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engines_refusal_names_the_callers_field(tmp_path, stream):
    gateway_app = await build_gateway_app(tmp_path)
    gateway_app.engine.last_words = INVALID
    async with gateway_app.client() as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "response_format": NAMED, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, None, "invalid_request_error")
    assert error["param"] == "response_format.json_schema.schema"
    assert error["message"] == "response_format.json_schema.schema cannot be followed: no such type"
    await gateway_app.assert_empty()
    assert list(gateway_app.limiter.ends.values()) == [[0]]


async def test_a_grammar_that_ends_in_the_middle_makes_no_answer_free(tmp_path, monkeypatch):
    gateway_app = await build_gateway_app(tmp_path)
    events = gateway_app.engine._events
    monkeypatch.setattr(gateway_app.engine, "_events", lambda request: [*events(request)[:4], INVALID])
    async with gateway_app.client() as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "response_format": NAMED})
    assert response.status_code == 400
    [record] = gateway_app.watcher.records
    assert list(gateway_app.limiter.ends.values()) == [[record.prompt_tokens + 3]]
    assert gateway_app.limiter.rows[0].counts.tokens == record.prompt_tokens + 3


async def test_an_answer_cannot_both_end_and_go_on(tmp_path):
    gateway_app = await build_gateway_app(tmp_path)
    async with gateway_app.client() as client:
        response = await client.post(
            "/v1/chat/completions", json={**CHAT, "response_format": NAMED, "ignore_eos": True}
        )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "ignore_eos")


async def test_over_grpc(tmp_path):
    wanted = {
        "json": ({"json": WRITTEN}, Grammar(GrammarKind.JSON_SCHEMA, WRITTEN)),
        "json_object": ({"json_object": True}, ANY_OBJECT),
        "regex": ({"regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        "grammar": ({"grammar": 'start: "x"'}, Grammar(GrammarKind.CONTEXT_FREE, 'start: "x"')),
        "choice": ({"choice": pb.Choices(choice=["a", "b"])}, Grammar(GrammarKind.CONTEXT_FREE, 'start: "a" | "b"')),
    }
    assert wanted.keys() == {field.name for field in pb.StructuredOutputs.DESCRIPTOR.fields}
    async with open_grpc_app(tmp_path) as api:
        for fields, grammar in wanted.values():
            await api.generation.Generate(ask(structured_outputs=pb.StructuredOutputs(**fields)), metadata=as_key())
            assert api.gateway_app.engine.requests[-1].params.grammar == grammar
        api.gateway_app.engine.last_words = INVALID
        for pattern, why in (("(", "unclosed group"), ("a", "no such type")):
            request = ask(structured_outputs=pb.StructuredOutputs(regex=pattern))
            refusal = await refused(api.generation.Generate(request, metadata=as_key()))
            assert (refusal.code, refusal.fields) == ("INVALID_ARGUMENT", ["structured_outputs.regex"])
            assert why in refusal.message


@pytest.mark.parametrize(
    ("fields", "field", "why"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, FORMAT, "not"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not a JSON document"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex", "70000 characters"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
    ],
)
async def test_what_cannot_be_followed_is_refused_before_tokens_are_reserved(tmp_path, fields, field, why):
    gateway_app = await build_gateway_app(tmp_path)
    async with gateway_app.client() as client:
        for path, prompt in (("chat/completions", CHAT), ("completions", {"model": BASE, "prompt": "hi"})):
            error = (await client.post(f"/v1/{path}", json={**prompt, **fields})).json()["error"]
            assert (error["param"], error["type"]) == (field, "invalid_request_error")
            assert why in error["message"]
    assert not gateway_app.limiter.reserved_tokens and not gateway_app.engine.requests


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
        {"type": "object", "properties": {"uniqueItems": {"type": "array", "uniqueItems": True, "maxItems": 1}}},
        {"enum": [{"uniqueItems": True}]},
    ],
)
async def test_unique_items_that_demand_nothing_are_accepted(tmp_path, schema):
    gateway_app = await build_gateway_app(tmp_path)
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}},
    }
    async with gateway_app.client() as client:
        for fields in ({"guided_json": schema}, {"tools": [tool], "tool_choice": "required"}):
            response = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3, **fields})
            assert response.status_code == 200 or "context" in response.json()["error"]["message"], response.text


@pytest.mark.parametrize("place", ["items", "additionalProperties", "anyOf", "properties", "$defs"])
async def test_unique_items_are_refused_wherever_they_stand(tmp_path, place):
    unique = {"type": "array", "uniqueItems": True, "maxItems": 2}
    inner = {"items": unique, "anyOf": [unique], "additionalProperties": unique}.get(place, {"a": unique})
    gateway_app = await build_gateway_app(tmp_path)
    async with gateway_app.client() as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "guided_json": {place: inner}})
    assert response.status_code == 400
    assert "uniqueItems is not supported" in response.json()["error"]["message"]


def test_allowed_ids_next_to_each_other_are_one_range():
    assert allowed_tokens([9, 5, 6, 7, 5]).text == "start: <[5-7,9]> start"
    assert allowed_tokens([5]).text == "start: <[5]>{4000}"
    assert allowed_tokens(range(200_000)).text == "start: <[0-199999]> start"


async def test_allowed_ids_pass_the_gateways_trial_and_reach_the_engine(tmp_path):
    gateway_app = await build_gateway_app(tmp_path)
    async with gateway_app.client() as client:
        for ids in ([5, 7], [5]):
            response = await client.post("/v1/chat/completions", json={**CHAT, "allowed_token_ids": ids})
            assert response.status_code == 200, response.text
            assert gateway_app.engine.requests[-1].params.grammar == allowed_tokens(ids)
