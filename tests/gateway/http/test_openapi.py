"""The API's document: complete, and true of what the application answers."""

import json
from collections.abc import Iterator, Mapping
from functools import cache

import httpx
import jsonschema_rs
import pytest
import requests
from batch_fakes import stored_options
from fakes import BASE, build_gateway_app
from hypothesis import HealthCheck, settings
from redis.asyncio import Redis
from served import Served, served

from gateway.http.openapi.document import document
from gateway.http.openapi.operations import OPERATIONS
from gateway.http.time_limits import TIME_LIMIT_HEADERS
from tests.examples import examples

NAMES = [BASE, "pirate", "captain", "poet"]
KEYS = {"anyone": "", "tenant": "sk-acme", "admin": "sk-admin"}
WHO = {(operation.method, operation.path.replace(":path", "")): operation.who for operation in OPERATIONS}
DOCUMENT = document()
ENDPOINTS = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]


@cache
def api():
    """Return the document as schemathesis reads it. Imported here and below: it takes a second, and all test processes
    collect this file, of which one runs it."""
    import schemathesis

    return schemathesis.openapi.from_dict(document())


@cache
def promises():
    """Return the checks of an answer."""
    from schemathesis.checks import load_all_checks, not_a_server_error
    from schemathesis.specs.openapi import checks

    load_all_checks()
    return [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    ]


@pytest.fixture(scope="session")
def gateway(tmp_path_factory, valkey_server) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    options = stored_options(Redis.from_url(valkey_server.connection_url), root / "stored")
    with served(root, **options) as running:
        running.gateway_app.engine.tokens_per_event = 4
        yield running


@pytest.fixture(scope="session")
def session() -> Iterator[requests.Session]:
    """Keep connections between requests, of which there are thousands, and ask no environment for proxies."""
    with requests.Session() as kept:
        kept.trust_env = False
        yield kept


LIMITS = {"timeout", "stall_timeout", *TIME_LIMIT_HEADERS}


def leisurely(limit):
    """Raise a valid limit that an answer might exceed."""
    try:
        return limit if not 0 < float(limit) < 60 else type(limit)(60)
    except (TypeError, ValueError):
        return limit


def name_what_is_there(case) -> None:
    """Most requests should get beyond their model's name, and none should end because its caller gives it no time."""
    for place in (case.body, case.headers):
        for name in LIMITS.intersection(place) if isinstance(place, Mapping) else ():
            place[name] = leisurely(place[name])
    for place in (case.body, case.path_parameters):
        for name in ("model", "name") if isinstance(place, dict) else ():
            if isinstance(place.get(name), str) and len(place[name]) % 4:
                place[name] = NAMES[len(place[name]) % len(NAMES)]


@settings(
    max_examples=examples(4), derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
def assert_promised(case, gateway, session):
    name_what_is_there(case)
    key = KEYS[WHO[case.operation.method.upper(), case.operation.path]]
    headers = {"authorization": f"Bearer {key}"} if key else {}
    case.call_and_validate(base_url=gateway.url, session=session, headers=headers, checks=promises())


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_every_answer_is_one_that_the_document_promises(method, path, gateway, session):
    """Each operation is a test of its own. The test is built here, because pytest 9 gives all tests that schemathesis
    parametrizes the same node id, and pytest-xdist runs only the first of the tests that share one."""
    from schemathesis.generation.feedback import FeedbackSources
    from schemathesis.pytest._test_builder import build_operation_test

    check = build_operation_test(
        config=api().config,
        operation=api()[path][method],
        test_func=assert_promised,
        given_kwargs={},
        feedback=FeedbackSources(),
    )
    check(gateway=gateway, session=session)


async def test_every_route_is_in_the_document(tmp_path, valkey):
    gateway_app = await build_gateway_app(tmp_path, **stored_options(valkey, tmp_path / "stored"))
    routes = {(method, route.path) for route in gateway_app.app.router.routes for method in route.methods - {"HEAD"}}
    assert {(operation.method, operation.path) for operation in OPERATIONS} == routes
    async with gateway_app.client(None) as client:
        assert (await client.get("/openapi.json")).json() == DOCUMENT


def test_the_document_is_made_of_what_is_validated():
    schemas = DOCUMENT["components"]["schemas"]
    temperature = schemas["ChatRequest"]["properties"]["temperature"]["anyOf"][0]
    assert temperature == {"type": "number", "minimum": 0, "maximum": 2}
    assert "best_of" in schemas["CompletionRequest"]["properties"]
    assert "tools" in schemas["CompletionRequest"]["description"]
    assert "tools" not in schemas["ChatRequest"]["description"]
    unavailable = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]["503"]["description"]
    for code in ("lane_queue_full", "engine_unavailable", "preempted"):
        assert code in unavailable


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = 'See: <tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'
BODIES = {
    "/v1/chat/completions": "ChatRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/responses": "ResponsesRequest",
    "/v1/messages": "MessagesRequest",
    "/v1/embeddings": "EmbeddingsRequest",
    "/v1/rerank": "RerankRequest",
    "/v1/score": "ScoreRequest",
}
ANSWERED = [
    {},
    {"logprobs": True, "top_logprobs": 2},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}, "parallel_tool_calls": False},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
    {"guided_choice": ["a", "b"], "tools": [TOOL], "tool_choice": "none"},
    {"n": 2, "return_token_ids": True, "max_tokens": 3, "user": "me", "metadata": {"a": "b"}},
    {"prompt_logprobs": 2},
]


@cache
def valid(name):
    """Checks bodies against a named schema of the document."""
    return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})


@pytest.mark.parametrize("options", ANSWERED, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_chats_are_what_the_document_says(gateway, options, stream):
    gateway.gateway_app.engine.info.max_model_len = 2048
    gateway.gateway_app.engine.reply = lambda sent: CALL
    body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 99, **options}
    response = ask(gateway, "/v1/chat/completions", {**body, "stream": stream and "prompt_logprobs" not in body})
    for chunk in events(response) if stream else []:
        valid(event_data("/v1/chat/completions")).validate(chunk)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": 2},
        {"echo": True},
        {"n": 2, "return_token_ids": True},
        {"echo": True, "logprobs": 2, "max_tokens": 0},
        {"prompt_logprobs": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_what_the_document_says(gateway, options, stream):
    body = {"model": BASE, "prompt": ["a", "b"], "service_tier": "flex", "logit_bias": {"5": 1}, **options}
    response = ask(gateway, "/v1/completions", {**body, "stream": stream and "prompt_logprobs" not in body})
    for chunk in events(response) if stream else []:
        valid(event_data("/v1/completions")).validate(chunk)


RESPONDED = [
    {},
    {"max_output_tokens": 3, "metadata": {"a": "b"}, "service_tier": "flex", "store": False},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "instructions": "Be brief."},
    {"tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}], "tool_choice": "required"},
    {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
    {"background": True},
]


@pytest.mark.parametrize("options", RESPONDED, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_responses_are_what_the_document_says(gateway, options, stream):
    gateway.gateway_app.engine.info.max_model_len = 2048
    gateway.gateway_app.engine.reply = lambda sent: CALL
    response = ask(gateway, "/v1/responses", {"model": BASE, "input": "hi", **options, "stream": stream})
    frames = [frame.partition("\ndata: ") for frame in response.text.split("\n\n") if stream and frame]
    for name, _, data in frames:
        event = json.loads(data)
        valid(event_data("/v1/responses")).validate(event)
        assert name == f"event: {event['type']}"
    assert len(frames) > 8 or not stream


LOOK = {"name": "look", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    "options", [{}, {"tools": [LOOK]}, {"stop_sequences": ["See"], "system": "Be brief."}], ids=str
)
@pytest.mark.parametrize("stream", [False, True])
def test_messages_are_what_the_document_says(gateway, options, stream):
    gateway.gateway_app.engine.info.max_model_len = 2048
    gateway.gateway_app.engine.reply = lambda sent: CALL
    said = [{"type": "text", "text": "hi"}]
    body = {"model": BASE, "messages": [{"role": "user", "content": said}], "max_tokens": 99, **options}
    response = ask(gateway, "/v1/messages", {**body, "stream": stream})
    for event in events(response) if stream else []:
        valid(event_data("/v1/messages")).validate(event)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "hi", "encoding_format": "base64", "dimensions": 4, "pooling": "mean"}),
        ("/v1/embeddings", {"input": [[5, 6], [7]], "normalize": False, "service_tier": "flex"}),
        ("/v1/rerank", {"query": "hi", "documents": ["ho", {"text": "he"}], "top_n": 1}),
        ("/v1/rerank", {"query": "hi", "documents": ["ho"], "return_documents": False}),
        ("/v1/score", {"text_1": "hi", "text_2": ["ho", "he"]}),
    ],
    ids=str,
)
def test_vectors_are_what_the_document_says(gateway, path, body):
    ask(gateway, path, {"model": BASE, **body})


def event_data(path):
    """Name of the schema of a stream's events."""
    contents = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
    return contents["text/event-stream"]["x-event-data"]["$ref"].rpartition("/")[2]


def ask(gateway, path, body):
    """A request that has to be granted, and an answer that has to be as promised."""
    valid(BODIES[path]).validate(body)
    case = api()[path]["POST"].Case(body=body, media_type="application/json")
    response = case.call(base_url=gateway.url, headers={"authorization": "Bearer sk-acme"})
    assert response.status_code == 200, response.text
    case.validate_response(response, checks=promises())
    return response


def events(response):
    frames = response.text.split("\n\n")
    data = [frame.partition("data: ")[2] for frame in frames]
    return [json.loads(text) for text in data if text.startswith("{")]


@pytest.mark.parametrize(("status", "key", "body"), [(401, "wrong", {}), (403, "sk-acme", {}), (400, "sk-admin", {})])
def test_refusals_keep_their_promise_too(gateway, status, key, body):
    operation = api()["/v1/load_lora_adapter"]["POST"]
    case = operation.Case(body=body, media_type="application/json")
    response = case.call(base_url=gateway.url, headers={"authorization": f"Bearer {key}"})
    assert response.status_code == status
    case.validate_response(response, checks=promises())


def test_a_stranger_may_read_it(gateway):
    assert httpx.get(f"{gateway.url}/openapi.json").json()["openapi"] == "3.1.0"
