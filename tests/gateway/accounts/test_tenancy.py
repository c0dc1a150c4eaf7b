"""What a tenant can find out about others, over every route: nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from batch_fakes import stored_options
from fakes import BASE, KEYS, GatewayApp, build_gateway_app
from google.protobuf import descriptor_pool
from grpc_app import as_key, refused
from redis.asyncio import Redis

from gateway.api_schema.operation import PLACEHOLDER, Operation
from gateway.core.tenants import hash_key
from gateway.http.openapi.operations import OPERATIONS
from gateway.pb import adapters_pb2 as adapters_pb
from gateway.pb import generation_pb2 as pb
from gateway.pb import json_api_pb2 as json_pb
from gateway.pb.generation_pb2_grpc import GenerationStub
from gateway.pb.json_api_pb2_grpc import JsonApiStub
from gateway.rpc.api import SERVICES, GrpcServer

FORBIDDEN, UNKNOWN = "poet", "bard"
"""Another tenant's adapter, and none at all. Of one length."""
OTHERS = (FORBIDDEN, "acme", "initech", "sk-acme")
"""What a tenant must never be told of, being globex."""
FORBIDDEN_ANSWERS = ((403, "forbidden"), (403, "permission_error"))
"""Status and code of OpenAI's error and, where there are no codes, status and type of Anthropic's."""
VARYING = {"x-request-id", "request-id", "date"}


@pytest.fixture
async def gateway_app(valkey, tmp_path) -> GatewayApp:
    """Acme keeps the poet to itself."""
    gateway_app = await build_gateway_app(tmp_path, **stored_options(valkey, tmp_path / "stored"))
    await gateway_app.adapters.allow("poet", ["acme"])
    await gateway_app.adapters.alias("poet", "lyricist")
    return gateway_app


def operations(who: str) -> list[Operation]:
    return [operation for operation in OPERATIONS if operation.who == who]


def label(operation: Operation) -> str:
    return f"{operation.method} {operation.path}"


def path_of(operation: Operation, name: str) -> str:
    return PLACEHOLDER.sub(name, operation.path)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
NAMELESS = {
    "GET /v1/models": 200,
    "GET /v1/files": 200,
    "POST /v1/files": 400,
    "GET /v1/batches": 200,
    "POST /v1/batches": 400,
}
"""Expected status of each operation when the request names no object."""
FIELDS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/v1/messages/count_tokens": CHAT,
    "/v1/embeddings": {"input": "hi"},
    **{key: {"query": "hi", "documents": ["ho"]} for key in ("/v1/rerank", "/rerank", "/v2/rerank")},
    "/invocations": {"prompt": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/score": {"text_1": "hi", "text_2": "ho"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [9]},
}
JSON_PATHS = {
    "create_response": "/v1/responses",
    "create_message": "/v1/messages",
    "count_message_tokens": "/v1/messages/count_tokens",
}
"""Calls of JsonApi that name a model, with the paths of the same over HTTP."""


def bodies(operation: Operation, name: str) -> Iterator[dict[str, Any] | None]:
    """Every way in which a body of this operation can name an adapter."""
    if operation.path not in FIELDS:
        yield None
        return
    rest = FIELDS[operation.path]
    yield {**rest, "model": name}
    yield {**rest, "model": f"{BASE}:{name}"}
    if operation.events is not None:
        yield {**rest, "model": name, "stream": True}
    if operation.is_limited:
        for field in ("adapter_id", "lora_path"):
            yield {**rest, "model": BASE, field: name}
            yield {**rest, "model": "pirate", field: name}


async def ask(gateway_app: GatewayApp, operation: Operation, name: str, body: Any, key: str | None) -> httpx.Response:
    async with gateway_app.client(key) as client:
        content = json.dumps(body) if body is not None else None
        return await client.request(operation.method, path_of(operation, name), content=content)


def shape(response: httpx.Response, name: str) -> tuple[int, frozenset[tuple[str, str]], str]:
    """All that may differ is the name that was asked for, and the id that the request got."""
    headers = frozenset((key, value) for key, value in response.headers.items() if key not in VARYING)
    return (
        response.status_code,
        headers,
        response.text.replace(name, "NAME").replace(response.headers["x-request-id"], "ID"),
    )


@pytest.mark.parametrize("operation", operations("tenant"), ids=label)
async def test_what_is_anothers_is_as_what_is_not_there(gateway_app, operation, monkeypatch):
    work: list[str] = []
    encode = gateway_app.gateway.models.default.tokenizer.encode

    async def counted(text: str, **more: Any) -> Any:
        work.append(text)
        return await encode(text, **more)

    monkeypatch.setattr(gateway_app.gateway.models.default.tokenizer, "encode", counted)
    for body, other in zip(bodies(operation, FORBIDDEN), bodies(operation, UNKNOWN), strict=True):
        answers = [
            shape(await ask(gateway_app, operation, name, sent, "sk-globex"), name)
            for name, sent in ((FORBIDDEN, body), (UNKNOWN, other))
        ]
        assert answers[0] == answers[1]
        assert answers[0][0] == NAMELESS.get(label(operation), 404)
    assert work == [], "nothing is done for either that would take its time"
    assert (gateway_app.engine.requests, gateway_app.limiter.reserved) == ([], [])


@pytest.mark.parametrize("operation", operations("tenant"), ids=label)
async def test_an_alias_of_anothers_is_as_what_is_not_there(gateway_app, operation):
    for body, other in zip(bodies(operation, "lyricist"), bodies(operation, "lyricism"), strict=True):
        answers = [
            shape(await ask(gateway_app, operation, name, sent, "sk-globex"), name)
            for name, sent in (("lyricist", body), ("lyricism", other))
        ]
        assert answers[0] == answers[1]


async def test_nothing_that_a_tenant_or_a_stranger_reads_names_others(gateway_app):
    async with gateway_app.client("sk-acme") as client:
        await client.post("/v1/completions", json={"model": "poet", "prompt": "secret words", "user": "acme's user"})
        await client.post("/v1/completions", json={"model": "pirate", "prompt": "secret words"})
    seen = []
    for operation in operations("tenant") + operations("anyone"):
        for name in (BASE, "pirate", "unknown"):
            for body in bodies(operation, name):
                answer = await ask(
                    gateway_app, operation, name, body, "sk-globex" if operation.who == "tenant" else None
                )
                seen.append(f"{answer.text} {dict(answer.headers)}")
    assert len(seen) > 30
    for text in seen:
        assert not [word for word in (*OTHERS, "lyricist", "secret") if word in text], text


async def test_models_are_those_of_the_caller(gateway_app):
    names = {}
    for key in ("sk-acme", "sk-globex", "sk-initech"):
        async with gateway_app.client(key) as client:
            names[key] = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
    assert names["sk-acme"] == [BASE, "pirate", "poet", "captain", "lyricist"]
    assert names["sk-globex"] == names["sk-initech"] == [BASE, "pirate", "captain"]


async def test_what_others_use_shows_in_no_ones_allowance(gateway_app):
    body = {"model": "pirate", "prompt": "hello", "max_tokens": 4}

    async def left() -> str:
        async with gateway_app.client("sk-globex") as client:
            answer = await client.post("/v1/completions", json=body)
        return answer.headers["x-ratelimit-remaining-requests"]

    assert await left() == "2"
    async with gateway_app.client("sk-acme") as client:
        for _ in range(20):
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert await left() == "1"


async def test_what_others_answers_were_like_shows_in_no_ones_reservation(gateway_app):
    for key in ("sk-acme", "sk-acme", "sk-initech"):
        async with gateway_app.client(key) as client:
            await client.post("/v1/chat/completions", json={"model": "pirate", **CHAT})
    first, second, others = (request.tokens for request in gateway_app.limiter.reserved)
    assert second < first == others


@pytest.mark.parametrize("operation", operations("admin"), ids=label)
async def test_an_administrators_route_is_closed_to_tenants_whatever_they_say(gateway_app, operation):
    answers = {
        shape(await ask(gateway_app, operation, name, body, key), name)
        for key in KEYS.keys() - {"sk-admin"}
        for name in (FORBIDDEN, UNKNOWN, "acme")
        for body in (None, {}, {"tenant": name}, "{")
    }
    assert len(answers) == 1
    status, _, text = answers.pop()
    assert (status, json.loads(text)["error"]["code"]) == (403, "forbidden")
    for key in (None, "sk-unknown", "sk-adminx"):
        assert (await ask(gateway_app, operation, FORBIDDEN, {}, key)).status_code == 401


@pytest.mark.parametrize("operation", operations("tenant"), ids=label)
async def test_a_tenants_route_is_closed_to_administrators(gateway_app, operation):
    for body in bodies(operation, "pirate"):
        answer = await ask(gateway_app, operation, "pirate", body, "sk-admin")
        error = answer.json()["error"]
        assert (answer.status_code, error.get("code") or error["type"]) in FORBIDDEN_ANSWERS
    assert gateway_app.engine.requests == []


async def test_metrics_are_for_those_who_may_know_every_tenant(tmp_path):
    gateway_app = await build_gateway_app(tmp_path, metrics_keys=[hash_key("sk-scraper")])
    statuses = {}
    for key in (None, "sk-acme", "sk-scraper", "sk-admin"):
        async with gateway_app.client(key) as client:
            statuses[key] = (await client.get("/metrics")).status_code
    assert statuses == {None: 401, "sk-acme": 403, "sk-scraper": 200, "sk-admin": 200}
    async with gateway_app.client("sk-scraper") as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/admin/v1/check")).status_code == 401
    gateway_app = await build_gateway_app(tmp_path, open_metrics=True)
    async with gateway_app.client(None) as client:
        assert (await client.get("/metrics")).status_code == 200


UNKNOWN_FIELD = b"\xfa\x7f\x01x"
"""Field 2047, as a newer client may send one that narrows what an operator asks for."""


@dataclass
class Method:
    path: str
    request: type[Any]
    answer: type[Any]
    streams: bool
    message: bytes = b""
    """The encoded request; an empty message has no bytes."""

    async def call(self, channel: grpc.aio.Channel, metadata: Any) -> None:
        kind = channel.unary_stream if self.streams else channel.unary_unary
        call = kind(self.path, None, self.answer.FromString)(self.message, metadata=metadata)
        if self.streams:
            await call.read()
        await call


def methods(admin: bool) -> list[Method]:
    """Return the methods of all gRPC services except health and reflection."""
    services = [descriptor_pool.Default().FindServiceByName(name) for name in SERVICES]
    return [
        Method(
            f"/{service.full_name}/{method.name}",
            method.input_type._concrete_class,
            method.output_type._concrete_class,
            method.server_streaming,
        )
        for service in services
        for method in service.methods
        if service.name.endswith("Admin") is admin
    ]


@asynccontextmanager
async def grpc_channel(root: Path, redis: Redis) -> AsyncIterator[tuple[GatewayApp, grpc.aio.Channel]]:
    gateway_app = await build_gateway_app(root, **stored_options(redis, root / "stored"))
    await gateway_app.adapters.allow("poet", ["acme"])
    server = GrpcServer(gateway_app.services, grace_seconds=0.0)
    async with server as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield gateway_app, channel


async def test_an_administrators_message_has_no_room_for_unknown_fields(tmp_path, valkey):
    async with grpc_channel(tmp_path, valkey) as (gateway_app, channel):
        for method in methods(admin=True):
            newer = replace(method, message=UNKNOWN_FIELD)
            refusal = await refused(newer.call(channel, as_key("admin")))
            assert (refusal.code, "does not know" in refusal.message) == ("INVALID_ARGUMENT", True), method.path
        load = adapters_pb.LoadAdapterRequest(name="bard", path="poet").SerializeToString() + UNKNOWN_FIELD
        call = channel.unary_unary("/loralane.v1.AdapterAdmin/Load")
        assert (await refused(call(load, metadata=as_key("admin")))).code == "INVALID_ARGUMENT"
        assert "bard" not in gateway_app.adapters.records


async def test_the_same_over_grpc(tmp_path, valkey):
    async with grpc_channel(tmp_path, valkey) as (gateway_app, channel):
        assert len(methods(admin=True)) > 20
        for method in methods(admin=True):
            assert (await refused(method.call(channel, as_key("globex")))).code == "PERMISSION_DENIED", method.path
            assert (await refused(method.call(channel, ()))).code == "UNAUTHENTICATED", method.path
        for method in methods(admin=False):
            assert (await refused(method.call(channel, as_key("admin")))).code == "PERMISSION_DENIED", method.path
        stub = GenerationStub(channel)
        for key, hidden in (("acme", set()), ("globex", {"poet"})):
            answer = await stub.ListModels(pb.ListModelsRequest(), metadata=as_key(key))
            assert {model.id for model in answer.models} == {BASE, "pirate", "poet", "captain"} - hidden
        told = []
        for name in (FORBIDDEN, UNKNOWN):
            for call, request in (
                (stub.Generate, pb.GenerateRequest(model=name, prompt="hi")),
                (stub.Embed, pb.EmbedRequest(model=name, input=["hi"])),
                (stub.Rerank, pb.RerankRequest(model=name, query="hi", documents=["ho"])),
                (stub.Score, pb.ScoreRequest(model=name, queries=["hi"], documents=["ho"])),
                (stub.Tokenize, pb.TokenizeRequest(model=name, prompt="hi")),
            ):
                refusal = await refused(call(request, metadata=as_key("globex")))
                details = [f"{kind}: {text}" for kind, text in refusal.details.items() if kind != "RequestInfo"]
                told.append([text.replace(name, "NAME") for text in (refusal.code, refusal.message, *details)])
            for kind, path in JSON_PATHS.items():
                request = json_pb.JsonRequest(**{kind: json.dumps({"model": name, **FIELDS[path]})})
                refusal = await refused(JsonApiStub(channel).Call(request, metadata=as_key("globex")))
                told.append([refusal.code, refusal.message.replace(name, "NAME"), str(refusal.fields)])
        assert told[: len(told) // 2] == told[len(told) // 2 :]
        assert {words[0] for words in told} == {"NOT_FOUND"}
        assert gateway_app.engine.requests == []
