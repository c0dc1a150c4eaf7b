"""What the mixed run sends: ordinary requests of several tenants, and hostile ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from gateway.pb import generation_pb2 as pb
from gateway.pb import json_api_pb2
from tests.fuzz.cases import HttpCase, make_case
from tests.fuzz.growth.http_fields import FORM_TYPE, JSON_TYPE
from tests.fuzz.growth.plan import all_fields
from tests.fuzz.growth.requests import Field, GrpcCall, HttpRequest, Request

TENANTS = {"sk-acme": "acme", "sk-globex": "globex", "sk-initech": "initech"}
MODEL = "tiny"
CHAT = {"messages": [{"role": "user", "content": "Tell me about the sea."}]}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
COUNTED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Paths whose answers speak of tokens that are charged."""
POOLED = ("/embeddings", "/rerank", "/score", "Generation/Embed", "Generation/Rerank", "Generation/Score")
"""What asks for vectors, which the instant engine has none of: its answers to them are charged and cannot be given."""
LARGEST_BYTES = 2**20
"""Largest growth of the hostile requests, so that thousands of them take minutes."""


@dataclass(frozen=True)
class Sent:
    """A request, who pays for it, and whether its answer has to be a good one."""

    request: Request
    tenant: str
    good: bool


def make_request(seed: int, number: int, hostile: float) -> Sent:
    """Return the request with this number of the run with this seed. `hostile`: share of the hostile ones."""
    rng = Random(f"mixed-{seed}-{number}")
    if rng.random() < hostile:
        sent = _grown(rng) if rng.random() < 0.5 else _random(rng, seed, number)
        if not _pools(sent.request):
            return sent
    key = rng.choice(list(TENANTS))
    return Sent(rng.choice(ORDINARY)(rng).with_key(key), TENANTS[key], good=True)


def _pools(request: Request) -> bool:
    path = request.method if isinstance(request, GrpcCall) else request.target.decode("latin-1")
    return any(name in path for name in POOLED)


def _json(path: str, **body: Any) -> HttpRequest:
    return HttpRequest("POST", path.encode(), (JSON_TYPE,), json.dumps({"model": MODEL, **body}).encode())


def _chat(rng: Random) -> HttpRequest:
    return _json("/v1/chat/completions", **CHAT, max_tokens=rng.randint(1, 40), n=rng.choice((1, 1, 1, 3)))


def _chat_stream(rng: Random) -> HttpRequest:
    return _json("/v1/chat/completions", **CHAT, **STREAMED, max_tokens=rng.randint(1, 40))


def _completion(rng: Random) -> HttpRequest:
    more = rng.choice((STREAMED, {"n": 2}, {}))
    return _json("/v1/completions", prompt="Ahoy " * rng.randint(1, 30), max_tokens=rng.randint(1, 20), **more)


def _response(rng: Random) -> HttpRequest:
    return _json(
        "/v1/responses", input="hi", max_output_tokens=rng.randint(16, 40), store=False, stream=rng.random() < 0.5
    )


def _message(rng: Random) -> HttpRequest:
    return _json("/v1/messages", **CHAT, max_tokens=rng.randint(1, 40), stream=rng.random() < 0.5)


def _tokens(rng: Random) -> HttpRequest:
    return rng.choice((_json("/tokenize", prompt="hi " * 20), _json("/detokenize", tokens=[1000, 1001])))


def _look(rng: Random) -> HttpRequest:
    return HttpRequest("GET", rng.choice((b"/v1/models", b"/v1/files", b"/v1/batches", b"/health")))


def _generate(rng: Random) -> GrpcCall:
    asked = pb.GenerateRequest(model=MODEL, prompt="Ahoy", n=rng.choice((1, 2)))
    asked.sampling.max_tokens = rng.randint(1, 40)
    streams = rng.random() < 0.5
    name = "GenerateStream" if streams else "Generate"
    return GrpcCall(f"/loralane.v1.Generation/{name}", (asked.SerializeToString(),), False, streams)


def _json_call(rng: Random) -> GrpcCall:
    body = json.dumps({"model": MODEL, **CHAT, "max_tokens": 8})
    asked = json_api_pb2.JsonRequest(create_message=body)
    return GrpcCall("/loralane.v1.JsonApi/Call", (asked.SerializeToString(),), False, False)


ORDINARY: tuple[Callable[[Random], Request], ...] = (
    *((_chat, _chat_stream, _completion, _response, _message) * 3),
    *(_generate, _generate, _json_call, _tokens, _look),
)


def upload(data: bytes) -> HttpRequest:
    parts = b'--edge\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    parts += b'--edge\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + data
    return HttpRequest("POST", b"/v1/files", (FORM_TYPE,), parts + b"\r\n--edge--\r\n")


def batch_lines(rng: Random) -> bytes:
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": _line_body(rng)}
        for number in range(rng.randint(1, 6))
    ]
    return "\n".join(map(json.dumps, lines)).encode()


def _line_body(rng: Random) -> dict[str, Any]:
    return {"model": MODEL, **CHAT, "max_tokens": rng.randint(1, 10)}


@cache
def _fields() -> list[Field]:
    """Return the fields of what tenants may call."""
    return [field for field in all_fields() if field.key in TENANTS]


def _grown(rng: Random) -> Sent:
    field = rng.choice(_fields())
    growth, size = rng.choice(list(field.growths)), rng.choice([size for size in field.sizes if size <= LARGEST_BYTES])
    key = rng.choice((field.key,) * 9 + ("",))
    request = field.growths[growth](size)
    if isinstance(request, HttpRequest) and JSON_TYPE in request.headers:
        request = replace(request, body=_with_usage(request.body))
    return Sent(request.with_key(key), TENANTS.get(key, ""), good=False)


def _random(rng: Random, seed: int, number: int) -> Sent:
    """Return a case of the other fuzzer, whose answer is read to its end and says its usage."""
    case = make_case(seed, number)
    if not isinstance(case, HttpCase):
        call = GrpcCall(case.method, case.messages, case.client_streams, case.server_streams)
        key = dict(case.metadata).get("authorization", "").removeprefix("Bearer ").replace("sk-admin", "sk-acme")
        return Sent(call.with_key(key), TENANTS.get(key, ""), good=False)
    headers = dict(case.headers)
    key = headers.pop("authorization", "").removeprefix("Bearer ").replace("sk-admin", "sk-acme")
    lines = tuple((name.encode(), value.encode("latin-1")) for name, value in headers.items())
    request = HttpRequest(case.method, case.path.encode(), lines, _with_usage(case.body))
    return Sent(request.with_key(key), TENANTS.get(key, ""), good=False)


def _with_usage(body: bytes) -> bytes:
    """Return the body of a stream with the wish for its usage."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(asked, dict) or asked.get("stream") is not True or "input" in asked:
        return body
    return json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()
