import gzip
import json
import random
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fakes import ACME, BASE, CONTEXT, KEYS, GatewayApp, build_gateway_app, key_ring, write_adapter

from engine.core.messages.requests import ErrorCode, FinishReason, Lane, Refusal, TokenEvent
from gateway.core.errors import ApiError, Fault
from gateway.http.coding import STEP_BYTES, decoded
from gateway.http.hints import method_hint, route_hint
from gateway.requests.settings import ServiceSettings

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path, max_body_bytes=10_000)


async def ask(gateway_app, body=CHAT, path="/v1/chat/completions", key="sk-acme", method="POST", **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with gateway_app.client(key) as client:
        return await client.request(method, path, content=content, headers=headers)


def check(response, status, code, param=None, type=None):
    """Every error has one shape, an id, and no Pydantic or Starlette accent."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (response.status_code, body["error"]["code"], body["error"]["param"]) == (status, code, param)
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    assert body["error"]["message"]
    if type is not None:
        assert body["error"]["type"] == type


async def test_invalid_json(gateway_app):
    check(await ask(gateway_app, b'{"model": '), 400, "invalid_json")


async def test_validation(gateway_app):
    response = await ask(gateway_app, {**CHAT, "temperature": "warm"})
    check(response, 400, "invalid_type", "temperature", "invalid_request_error")


async def test_unsupported_parameter(gateway_app):
    check(await ask(gateway_app, {**CHAT, "modalities": ["audio"]}), 400, "unsupported_parameter", "modalities")


@pytest.mark.parametrize(("ids", "wrong"), [([-1], -1), ([5, 2**31, -1], 2**31), ([[5], [10**6]], 10**6)])
async def test_ids_that_are_no_tokens_are_refused_before_they_are_echoed(gateway_app, ids, wrong):
    response = await ask(gateway_app, {"model": BASE, "prompt": ids, "echo": True}, "/v1/completions")
    check(response, 400, None, "prompt")
    assert response.json()["error"]["message"].endswith(f"not {wrong}")


LONG = "x" * (CONTEXT + 1)
TOO_LONG = {
    "/v1/chat/completions": {"model": BASE, "messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"model": BASE, "prompt": LONG},
    "/v1/embeddings": {"model": BASE, "input": ["hi", LONG]},
    "/v1/messages": {"model": BASE, "max_tokens": 5, "messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"model": BASE, "input": LONG},
}


@pytest.mark.parametrize("path", TOO_LONG)
async def test_a_request_refused_after_tokenizing_counts(gateway_app, path):
    answers = [await ask(gateway_app, TOO_LONG[path], path, "sk-globex") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [400, 400, 400, 429]


async def test_context_length_exceeded(gateway_app):
    response = await ask(gateway_app, {**CHAT, "messages": [{"role": "user", "content": "x" * CONTEXT}]})
    check(response, 400, "context_length_exceeded", "messages")
    assert str(CONTEXT) in response.json()["error"]["message"]


async def test_template_refusal(gateway_app):
    check(await ask(gateway_app, {**CHAT, "messages": [{"role": "assistant", "content": "x"}]}), 400, None, "messages")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", [ErrorCode.QUEUE_TIMEOUT, ErrorCode.LANE_QUEUE_FULL])
async def test_what_is_full_says_when_to_come_back(gateway_app, code, stream):
    refusal = Refusal(code, "too many are waiting", 7.0625)
    gateway_app.engine.last_words = TokenEvent("x", finish_reason=FinishReason.ERROR, refusal=refusal)
    response = await ask(gateway_app, {**CHAT, "stream": stream})
    check(response, 503, code.value, type="service_unavailable")
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("8", "7063")


async def test_a_refusal_that_no_wait_helps_names_none(gateway_app):
    refusal = Refusal(ErrorCode.QUEUE_TIMEOUT, "the deadline cannot be met")
    gateway_app.engine.last_words = TokenEvent("x", finish_reason=FinishReason.ERROR, refusal=refusal)
    response = await ask(gateway_app)
    check(response, 503, "queue_timeout")
    assert "retry-after" not in response.headers


async def test_goals_out_of_range(gateway_app):
    check(await ask(gateway_app, {**CHAT, "slo": {"ttft_ms": 0}}), 400, "decimal_below_min_value", "slo.ttft_ms")


@pytest.mark.parametrize("key", [None, "sk-wrong", ""])
async def test_invalid_api_key(gateway_app, key):
    response = await ask(gateway_app, key=key)
    check(response, 401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert "sk-wrong" not in response.text


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_forbidden(gateway_app, path):
    check(await ask(gateway_app, {"lora_name": "x", "lora_path": "x"}, path), 403, "forbidden")
    check(await ask(gateway_app, b"", "/admin/v1/check", method="GET"), 403, "forbidden")


@pytest.mark.parametrize("model", ["gpt-4", "poet", "tiny:poet"])
async def test_model_not_found(gateway_app, model):
    check(await ask(gateway_app, {**CHAT, "model": model}, key="sk-globex"), 404, "model_not_found", "model")


async def test_contradicting_names(gateway_app):
    check(await ask(gateway_app, {**CHAT, "model": "poet", "adapter_id": "pirate"}), 400, None, "adapter_id")


async def test_unknown_model_page(gateway_app):
    check(await ask(gateway_app, b"", "/v1/models/poet", "sk-globex", "GET"), 404, "model_not_found", "model")


async def test_unknown_route(gateway_app):
    check(await ask(gateway_app, path="/v1/nothing"), 404, None)


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/moderations", "moderates none"),
        ("/v1/responses/resp_1/retry", "/v1/responses itself"),
        ("/v1/audio/speech", "text"),
        ("/v1/images/generations", "text"),
    ],
)
async def test_what_openai_has_and_we_have_not(gateway_app, path, instead):
    response = await ask(gateway_app, {"model": BASE, "input": "hi"}, path)
    check(response, 404, None, None, "not_found_error")
    message = response.json()["error"]["message"]
    assert f"POST {path} is not supported" in message
    assert instead in message


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("//v1/models", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/chat-completions", "/v1/chat/completions"),
        ("/api/chat", "/v1/chat/completions"),
        ("/completion", "/v1/completions"),
        ("/generate", "/v1/completions"),
    ],
)
async def test_a_route_that_is_not_there_names_the_one_that_is(gateway_app, path, hint):
    async with gateway_app.client() as client:
        response = await client.post(f"http://gateway{path}", json=CHAT)
    check(response, 404, None, None, "not_found_error")
    assert response.json()["error"]["message"].endswith(f"did you mean {hint}?")


async def test_a_part_of_openais_api_is_no_id_of_ours(tmp_path, gateway_app):
    routes = {route.path for route in gateway_app.app.router.routes}
    for path, hint in (("/v1/responses/compact", "nothing is compacted"), ("/v1/responses/input_tokens", "/tokenize")):
        assert hint in (method_hint(path, routes) or "") and hint in (route_hint(path, routes) or "")
    assert method_hint("/v1/responses/resp_1", routes) is method_hint("/v1/responses", routes) is None
    assert route_hint("/v1/nothing", routes) is None
    assert route_hint("/v1/models" + "/" * 60_000, routes) is None, "a stranger's path takes no time"


async def test_method_not_allowed(gateway_app):
    response = await ask(gateway_app, b"", method="GET")
    check(response, 405, None)
    assert response.headers["allow"] == "POST"


async def test_all_methods_of_a_path_are_told(gateway_app):
    """They are routes of their own: the first that has the path knows of none but its own."""
    response = await ask(gateway_app, b"", "/admin/v1/limits", method="PUT")
    check(response, 405, None)
    assert response.headers["allow"] == "GET, HEAD, PATCH"
    assert "allowed: GET, HEAD, PATCH" in response.json()["error"]["message"]


async def test_adapter_conflict(gateway_app):
    response = await ask(gateway_app, {"lora_name": "poet", "lora_path": "poet"}, "/v1/load_lora_adapter", "sk-admin")
    check(response, 409, "adapter_conflict", "lora_name")
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("declared", [True, False])
async def test_request_too_large(gateway_app, declared):
    async def pieces():
        for _ in range(100):
            yield b" " * 1000
        raise AssertionError("read to the end")

    async with gateway_app.client() as client:
        content = b" " * 10_001 if declared else pieces()
        check(await client.post("/v1/chat/completions", content=content), 413, "request_too_large")


ENCODED = json.dumps(CHAT).encode()
zipped = partial(gzip.compress, mtime=0)  # names of tests are the same in all of pytest's processes


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", zipped(ENCODED)),
        ("X-GZIP", zipped(ENCODED)),
        (" Deflate ", zlib.compress(ENCODED)),
        ("identity", ENCODED),
        ("", ENCODED),
    ],
)
async def test_compressed_bodies_are_decoded(gateway_app, coding, body):
    response = await ask(gateway_app, body, **{"content-encoding": coding})
    assert response.status_code == 200, response.text
    response = await ask(gateway_app, body, "/v1/load_lora_adapter", "sk-admin", **{"content-encoding": coding})
    check(response, 400, "unknown_parameter", "model")


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "compress"])
async def test_unsupported_coding(gateway_app, coding):
    response = await ask(gateway_app, zipped(ENCODED), **{"content-encoding": coding})
    check(response, 415, "unsupported_coding")
    assert response.headers["accept-encoding"] == "gzip, x-gzip, deflate"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (zipped(ENCODED)[:-1], 400, None),
        (zipped(ENCODED) + b"x", 400, None),
        (zipped(ENCODED[:10]) + zipped(ENCODED[10:]), 400, None),
        (ENCODED, 400, None),
        (b"", 400, "invalid_json"),
        (zipped(b" " * 10_001), 413, "request_too_large"),
    ],
)
async def test_compressed_bodies_that_are_not_whole_or_too_large(gateway_app, body, status, code):
    check(await ask(gateway_app, body, **{"content-encoding": "gzip"}), status, code)


@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
async def test_a_compressed_body_may_come_in_any_pieces(size):
    content = bytes(random.Random(0).choices(b"abc ", k=3 * STEP_BYTES)) + b" " * (4 * STEP_BYTES + 3)
    body = zipped(content)

    async def pieces():
        for start in range(0, len(body), size):
            yield body[start : start + size]

    found = [piece async for piece in decoded(pieces(), "gzip")]
    assert b"".join(found) == content
    assert max(map(len, found)) <= STEP_BYTES


EMPTY_BLOCK = b"\x00\x00\x00\xff\xff"
WITHOUT_CONTENT = {
    "deflate": b"\x78\x9c" + EMPTY_BLOCK * 2001,
    "gzip": b"\x1f\x8b\x08\x10" + bytes(6) + b"a comment " * 1000,
}


@pytest.mark.parametrize("coding", WITHOUT_CONTENT)
async def test_a_compressed_body_is_bounded_by_what_arrives_too(gateway_app, coding):
    check(await ask(gateway_app, WITHOUT_CONTENT[coding], **{"content-encoding": coding}), 413, "request_too_large")


async def test_rate_limit_exceeded_by_requests(gateway_app):
    body = {"model": "pirate", "prompt": "hi", "max_tokens": 1}
    for _ in range(3):
        assert (await ask(gateway_app, body, "/v1/completions", "sk-globex")).status_code == 200
    response = await ask(gateway_app, body, "/v1/completions", "sk-globex")
    check(response, 429, "rate_limit_exceeded", None, "requests")
    assert 0 < int(response.headers["retry-after-ms"]) <= 20_000
    assert response.headers["x-ratelimit-remaining-requests"] == "0"


async def test_rate_limit_exceeded_by_tokens(gateway_app):
    body = {"model": "pirate", "prompt": "hi", "max_tokens": 150, "stream": True}
    gateway_app.engine.reply = lambda sent: "x" * 140
    await ask(gateway_app, body, "/v1/completions", "sk-globex")
    check(await ask(gateway_app, body, "/v1/completions", "sk-globex"), 429, "rate_limit_exceeded", None, "tokens")


async def test_insufficient_quota(gateway_app):
    body = {"model": "pirate", "prompt": "hi", "max_tokens": 220}
    response = await ask(gateway_app, body, "/v1/completions", "sk-globex")
    check(response, 429, "insufficient_quota")
    assert response.headers["x-should-retry"] == "false"


async def test_limiter_unavailable(gateway_app, monkeypatch):
    async def closed(request):
        raise ApiError(Fault.LIMITER_UNAVAILABLE, "cannot check", retry_after=1.0)

    monkeypatch.setattr(gateway_app.limiter, "reserve", closed)
    check(await ask(gateway_app), 503, "limiter_unavailable")


async def test_engine_unavailable(gateway_app):
    gateway_app.engine.ready = False
    response = await ask(gateway_app)
    check(response, 503, "engine_unavailable")
    assert response.headers["retry-after"] == "1"


async def test_lane_queue_full(tmp_path):
    gateway_app = await build_gateway_app(tmp_path, ServiceSettings(lane_capacity={Lane.BATCH: 0}))
    check(await ask(gateway_app, {**CHAT, "service_tier": "flex"}), 503, "lane_queue_full")
    assert (await ask(gateway_app)).status_code == 200


async def test_deadline_exceeded(tmp_path):
    gateway_app = await build_gateway_app(tmp_path, ServiceSettings(request_timeout=0.05))
    gateway_app.engine.pause = 0.1
    check(await ask(gateway_app), 504, "deadline_exceeded")
    await gateway_app.assert_empty()


@pytest.mark.parametrize("error", [ZeroDivisionError, OSError])
async def test_internal_errors_show_an_id_and_nothing_else(gateway_app, monkeypatch, error):
    def broken(*args):
        raise error("secret")

    monkeypatch.setattr("gateway.openai.render.Envelope.complete", broken)
    response = await ask(gateway_app, **{"x-request-id": "find-me"})
    check(response, 500, "internal_error")
    assert "find-me" in response.json()["error"]["message"]
    assert "secret" not in response.text
    await gateway_app.assert_empty()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "../outside"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "missing"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a\0b"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a" * 5000}, "lora_path"),
        ({"lora_name": "a:b", "lora_path": "poet"}, "lora_name"),
        ({"lora_name": "", "lora_path": "poet"}, "lora_name"),
        ({"lora_name": BASE, "lora_path": "poet"}, "lora_name"),
    ],
)
async def test_adapters_that_cannot_be_loaded(gateway_app, body, param):
    check(await ask(gateway_app, body, "/v1/load_lora_adapter", "sk-admin"), 400, None, param)


async def test_bodies_of_adapters_are_checked(gateway_app):
    for body, code, param in (
        ({"lora_name": "x"}, "missing_required_parameter", "lora_path"),
        ({"lora_name": 5, "lora_path": "poet"}, "invalid_type", "lora_name"),
    ):
        check(await ask(gateway_app, body, "/v1/load_lora_adapter", "sk-admin"), 400, code, param)


async def test_values_in_bodies_of_administrators_are_not_quoted(gateway_app):
    body = {"name": "x", "source": "poet", "tenants": "sk-secret"}
    response = await ask(gateway_app, body, "/admin/v1/adapters", "sk-admin")
    check(response, 400, "invalid_type", "tenants")
    assert "sk-secret" not in response.text


async def test_a_link_out_of_the_root_is_not_followed(gateway_app, tmp_path_factory):
    outside = write_adapter(tmp_path_factory.mktemp("outside"), "spy")
    root = Path(gateway_app.adapters.records["poet"].path).parent
    (root / "link").symlink_to(outside)
    body = {"lora_name": "x", "lora_path": str(root / "link")}
    check(await ask(gateway_app, body, "/v1/load_lora_adapter", "sk-admin"), 400, None, "lora_path")


async def test_an_adapter_the_engine_rejects(gateway_app):
    gateway_app.engine.rejected = "lora_A of q_proj has 64 columns, the model 576"
    write_adapter(Path(gateway_app.adapters.records["poet"].path).parent, "misfit")
    response = await ask(gateway_app, {"lora_name": "x", "lora_path": "misfit"}, "/v1/load_lora_adapter", "sk-admin")
    check(response, 400, None, "lora_path")
    assert "64 columns" in response.json()["error"]["message"]


async def test_unloading_what_is_not_there(gateway_app):
    check(
        await ask(gateway_app, {"lora_name": "x"}, "/v1/unload_lora_adapter", "sk-admin"),
        404,
        "model_not_found",
        "model",
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
async def test_tokenizing_what_makes_no_sense(gateway_app, path, body, param):
    response = await ask(gateway_app, body, path)
    assert response.json()["error"]["param"].startswith(param.partition("[")[0])
    assert response.status_code == 400


@pytest.mark.parametrize("asked", ["has spaces", "x" * 200, "new\tline", ""])
async def test_request_ids_that_are_not_sane_are_replaced(gateway_app, asked):
    response = await ask(gateway_app, **{"x-request-id": asked})
    assert response.headers["x-request-id"].startswith("req-")


async def test_a_tenant_of_the_batch_lane_is_served_there(gateway_app):
    slow = replace(ACME, name="slow", default_lane=Lane.BATCH, highest_lane=Lane.BATCH)
    gateway_app.open_again(key_ring(dict.fromkeys(KEYS, slow)))
    response = await ask(gateway_app, {**CHAT, "service_tier": "priority"})
    assert (response.headers["x-loralane-lane"], response.json()["service_tier"]) == ("batch", "flex")


async def test_a_client_that_leaves_while_sending_is_no_error(gateway_app):
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", b"Bearer sk-acme")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    await gateway_app.app(scope, receive, send)
    assert sent == []
    assert gateway_app.engine.requests == []
