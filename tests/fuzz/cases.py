"""Requests that the fuzzer sends: each follows from a seed and a number alone, so that any of them can be repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any
from urllib.parse import quote

from google.protobuf.descriptor import MethodDescriptor

from gateway.http.time_limits import TIME_LIMIT_HEADERS
from gateway.pb import (
    adapters_pb2,
    batches_pb2,
    generation_pb2,
    json_api_pb2,
    limits_pb2,
    operations_pb2,
    tenants_pb2,
    usage_pb2,
)
from tests.fuzz.messages import message_bytes
from tests.fuzz.values import MODELS, TEXTS, Values, api, mangled

KEYS = ("sk-acme",) * 40 + ("sk-globex", "sk-admin", "sk-wrong", "")
"""The neighbour's key is not among them."""
GENERATION = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score"),
)
HARMS_OTHERS = ("/admin/v1/lanes/", "/admin/v1/engines/")
"""What an administrator may do to every tenant is no case of a tenant's."""
PROTOS = (adapters_pb2, batches_pb2, generation_pb2, json_api_pb2, limits_pb2, operations_pb2, tenants_pb2, usage_pb2)


@dataclass(frozen=True)
class HttpCase:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    hang_up_after: int | None
    """Bytes of the answer after which the client goes away; None means that it reads the whole answer."""

    def __str__(self) -> str:
        headers = "".join(f" -H {name!r}:{value!r}" for name, value in self.headers.items())
        gone = "" if self.hang_up_after is None else f" (hangs up after {self.hang_up_after} bytes)"
        return f"{self.method} {self.path}{headers} {_shown(self.body)}{gone}"


@dataclass(frozen=True)
class GrpcCase:
    method: str
    """As in /loralane.v1.Generation/Generate."""
    metadata: tuple[tuple[str, str], ...]
    messages: tuple[bytes, ...]
    client_streams: bool
    server_streams: bool
    hang_up_after: int | None
    """Messages of the answer after which the client cancels; None means that it reads the whole answer."""

    def __str__(self) -> str:
        messages = " ".join(map(_shown, self.messages))
        return f"{self.method} {dict(self.metadata)} {messages}"


Case = HttpCase | GrpcCase


def make_case(seed: int, number: int) -> Case:
    """Return the case with this number of the run with this seed."""
    rng = Random(f"{seed}-{number}")
    return _grpc_case(rng) if rng.random() < 0.25 else _http_case(rng)


def _http_case(rng: Random) -> HttpCase:
    key, operations = rng.choice(KEYS), all_operations()
    generation = [operation for operation in operations if operation[1] in GENERATION]
    method, path, operation = rng.choice(generation if rng.random() < 0.6 else operations)
    if key == "sk-admin" and path.startswith(HARMS_OTHERS):
        key = "sk-acme"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body, content_type = _body(rng, operation)
    if content_type:
        headers["content-type"] = content_type
    if rng.random() < 0.05:
        name = rng.choice(("x-request-id", "accept", "origin", "traceparent", *TIME_LIMIT_HEADERS))
        headers[name] = rng.choice(("", "a" * 3_000, "\xff", "text/html", "null", "-1", "00-0-0-0", "nan", "3600"))
    hang_up = rng.choice((0, 1, 100, 400)) if rng.random() < 0.05 else None
    return HttpCase(method, _path(rng, path, operation), headers, body, hang_up)


def _path(rng: Random, path: str, operation: Mapping[str, Any]) -> str:
    query = []
    for parameter in operation.get("parameters", ()):
        name = parameter["name"]
        value = rng.choice((*MODELS, *TEXTS[:10], "1", "-1", "0", "100000000000000000000", "nan"))
        if parameter["in"] == "path":
            path = path.replace(f"{{{name}}}", quote(value[:200].encode("utf-8", "replace"), safe=""))
        elif parameter["in"] == "query" and rng.random() < 0.5:
            query.append(f"{name}={quote(value[:200].encode('utf-8', 'replace'), safe='')}")
    return path + ("?" + "&".join(query) if query else "")


def _body(rng: Random, operation: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return a body and its content type; both are empty where the operation has none."""
    content = operation.get("requestBody", {}).get("content", {})
    if "multipart/form-data" in content:
        return _form(rng)
    if "application/json" not in content:
        return b"", ""
    wrong = rng.choice((0.0, 0.0, 0.0, 0.02, 0.1, 0.3))
    values = Values(rng, api()["components"]["schemas"], wrong)
    made = values.of(content["application/json"]["schema"])
    if isinstance(made, dict) and "messages" in made and rng.random() < 0.3:
        made = {"model": "tiny", "messages": made["messages"], "max_tokens": 5, **_constraint(rng, values)}
    if rng.random() < 0.08:
        return mangled(rng, made), "application/json"
    return json.dumps(made).encode(), "application/json" if rng.random() < 0.98 else "text/plain"


def _constraint(rng: Random, values: Values) -> dict[str, Any]:
    """Return the fields of a chat that have its answer keep to a grammar, in one of the ways that clients know."""
    schema = values.of({}, "schema")
    function = {"name": "f", "parameters": schema, "strict": True}
    guided = rng.choice(("guided_json", "guided_regex", "guided_grammar"))
    answer = {"name": "x", "schema": schema, "strict": True}
    return rng.choice(
        (
            {"response_format": {"type": "json_schema", "json_schema": answer}},
            {"tools": [{"type": "function", "function": function}], "tool_choice": rng.choice(("auto", "required"))},
            {guided: values.of({}, guided)},
            {"structured_outputs": {guided.removeprefix("guided_"): values.of({}, guided)}},
        )
    )


def _form(rng: Random) -> tuple[bytes, str]:
    lines = [rng.choice((b'{"custom_id": "a"}', b"", b"\xff\xfe", b"{" * 300)) for _ in range(rng.choice((0, 1, 5)))]
    purpose, name = rng.choice((b"batch", b"assistants", b"", b"\xff")), rng.choice((b"a.jsonl", b"../x", b""))
    parts = [
        b'content-disposition: form-data; name="purpose"\r\n\r\n' + purpose,
        b'content-disposition: form-data; name="file"; filename="' + name + b'"\r\n\r\n' + b"\n".join(lines),
    ]
    chosen = [part for part in parts if rng.random() < 0.95] * rng.choice((1, 1, 1, 2))
    body = b"".join(b"--edge\r\n" + part + b"\r\n" for part in chosen) + b"--edge--\r\n"
    whole = body if rng.random() < 0.9 else body[: rng.randrange(len(body))]
    return whole, f"multipart/form-data; boundary={rng.choice(('edge', 'edge', 'edge', 'edge', 'other', ''))}"


def _grpc_case(rng: Random) -> GrpcCase:
    protos = ((generation_pb2, "Generation"), (json_api_pb2, "JsonApi"))
    generation = [method for proto, name in protos for method in proto.DESCRIPTOR.services_by_name[name].methods]
    method = rng.choice(generation if rng.random() < 0.6 else all_methods())
    harms_others = method.containing_service.name in ("LaneAdmin", "EngineAdmin")
    key = rng.choice([key for key in KEYS if key != "sk-admin"] if harms_others else KEYS)
    count = rng.choice((0, 1, 2, 4)) if method.client_streaming else 1
    messages = tuple(message_bytes(rng, method.input_type) for _ in range(count))
    return GrpcCase(
        f"/{method.containing_service.full_name}/{method.name}",
        (("authorization", f"Bearer {key}"),) if key else (),
        messages,
        method.client_streaming,
        method.server_streaming,
        rng.choice((0, 1, 3)) if rng.random() < 0.05 or method.name.startswith("Watch") else None,
    )


@cache
def all_operations() -> list[tuple[str, str, Mapping[str, Any]]]:
    return [
        (method.upper(), path, operation)
        for path, operations in api()["paths"].items()
        for method, operation in operations.items()
        if "responses" in operation
    ]


@cache
def all_methods() -> list[MethodDescriptor]:
    services = [service for proto in PROTOS for service in proto.DESCRIPTOR.services_by_name.values()]
    return [method for service in services for method in service.methods]


def _shown(data: bytes) -> str:
    return f"{data[:1500]!r}" + (f" ({len(data)} bytes)" if len(data) > 1500 else "")
