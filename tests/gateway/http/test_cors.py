"""Web pages of other origins: which may call the API, what they may read, and that none may administer."""

from __future__ import annotations

import httpx
import pytest
from browser import chromium, pages
from fakes import build_gateway_app
from served import served

from gateway.config.sections import HttpConfig
from gateway.core.safe_url import LOOPBACK, origin_pattern
from gateway.http.cors import Cors
from gateway.http.edge import RequestMiddleware

CHAT = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}]}
PAGE = "https://chat.example.com"
ALLOWED = "access-control-allow-origin"


@pytest.fixture
async def gateway_app(tmp_path):
    return await build_gateway_app(tmp_path, cors_origins=(PAGE, *LOOPBACK), max_body_bytes=10_000)


async def preflight(gateway_app, path: str, origin: str = PAGE, method: str = "POST") -> httpx.Response:
    asked = "authorization, content-type, x-request-id, x-stainless-lang, x-stainless-retry-count, openai-organization"
    headers = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": asked}
    async with gateway_app.client(None) as client:
        answer = await client.options(path, headers=headers)
    assert answer.headers.get("access-control-allow-credentials") is None
    if ALLOWED in answer.headers:
        assert set(answer.headers["access-control-allow-headers"].split(", ")) == set(asked.split(", "))
    return answer


async def test_a_preflight_needs_no_key_and_allows_what_clients_send(gateway_app):
    answer = await preflight(gateway_app, "/v1/chat/completions")
    assert (answer.status_code, answer.headers[ALLOWED]) == (200, PAGE)
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "Origin" in answer.headers["vary"]
    deletion = await preflight(gateway_app, "/v1/files/file-1", method="DELETE")
    assert deletion.headers[ALLOWED] == PAGE


@pytest.mark.parametrize("origin", ["https://evil.example", "https://chat.example.com.evil.example", "null"])
async def test_other_origins_get_no_permission(gateway_app, origin):
    answer = await preflight(gateway_app, "/v1/chat/completions", origin)
    assert answer.status_code == 400
    assert ALLOWED not in answer.headers
    async with gateway_app.client() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"origin": origin})
    assert ALLOWED not in answer.headers
    assert answer.headers["vary"] == "Origin"


ERRORS = {
    401: ("sk-wrong", "/v1/chat/completions", CHAT),
    404: ("sk-acme", "/v1/nothing", CHAT),
    405: ("sk-acme", "/v1/models", CHAT),
    413: ("sk-acme", "/v1/chat/completions", CHAT | {"user": "x" * 20_000}),
    429: ("sk-globex", "/v1/chat/completions", CHAT | {"max_tokens": 200}),
}


@pytest.mark.parametrize("status", ERRORS)
async def test_a_page_may_read_errors_too(gateway_app, status):
    key, path, body = ERRORS[status]
    async with gateway_app.client(key) as client:
        answer = await client.post(path, json=body, headers={"origin": PAGE})
    assert (answer.status_code, answer.headers[ALLOWED]) == (status, PAGE)
    assert answer.headers["vary"] == "Origin"
    assert answer.headers["x-request-id"]
    own = {name for name in answer.headers if name.startswith(("x-", "retry-"))}
    assert own <= set(answer.headers["access-control-expose-headers"].split(", "))


@pytest.mark.parametrize("path", ["/admin/tenants", "/console", "/metrics", "/v1/load_lora_adapter"])
async def test_no_page_of_another_origin_administers(tmp_path, path):
    gateway_app = await build_gateway_app(tmp_path, cors_origins=("*",))
    answer = await preflight(gateway_app, path)
    assert answer.status_code in (401, 404, 405)
    async with gateway_app.client("sk-admin") as client:
        answer = await client.get(path, headers={"origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_any_origin_is_allowed_without_credentials(tmp_path):
    gateway_app = await build_gateway_app(tmp_path, cors_origins=("*",))
    assert (await preflight(gateway_app, "/v1/models", method="GET")).headers[ALLOWED] == "*"


async def test_there_is_no_layer_without_origins_nor_at_an_administrators_port(tmp_path):
    assert isinstance((await build_gateway_app(tmp_path)).app, RequestMiddleware)
    assert isinstance((await build_gateway_app(tmp_path, cors_origins=(PAGE,), surface="admin")).app, RequestMiddleware)
    assert isinstance((await build_gateway_app(tmp_path, cors_origins=(PAGE,), surface="public")).app, Cors)


async def test_a_page_whose_name_was_rebound_to_the_gateway_has_no_key(gateway_app):
    async with gateway_app.client(None) as client:
        headers = {"host": "evil.example", "origin": "http://evil.example", "cookie": "key=sk-admin"}
        for path in ("/v1/models", "/metrics", "/admin/tenants"):
            assert (await client.get(path, headers=headers)).status_code in (401, 404)


@pytest.mark.parametrize(
    "value", ["chat.example.com", "https://a.example/", "HTTPS://a.example", "https://*.example", "null", "file://x"]
)
def test_what_no_browser_sends_is_refused(value):
    with pytest.raises(ValueError, match="cors_origins must hold origins"):
        HttpConfig(cors_origins=(value,))


def test_any_origin_stands_alone():
    with pytest.raises(ValueError, match="leave the others out"):
        HttpConfig(cors_origins=("*", PAGE))
    assert "." not in origin_pattern((PAGE,)).replace(r"\.", "")


SCRIPT = """async (gateway) => {
    const answer = await fetch(`${gateway}/v1/chat/completions`, {
        method: "POST",
        headers: {"authorization": "Bearer sk-acme", "content-type": "application/json", "x-stainless-lang": "js"},
        body: JSON.stringify({model: "pirate", stream: true, messages: [{role: "user", content: "hi"}]}),
    });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) text += part.value;
    return {status: answer.status, id: answer.headers.get("x-request-id"), text};
}"""
REFUSED = "async (url) => { try { await fetch(url, {headers: {authorization: 'Bearer sk-admin'}}); return false } \
catch (error) { return error.name } }"


def test_a_page_of_another_origin_streams_a_chat(tmp_path):
    with chromium() as browser, pages() as port, served(tmp_path, cors_origins=("http://127.0.0.1:*",)) as gateway:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        found = page.evaluate(SCRIPT, gateway.url)
        assert (found["status"], found["text"].rstrip()[-12:]) == (200, "data: [DONE]")
        assert found["id"]
        assert found["text"].count("data: ") > 3
        assert page.evaluate(REFUSED, f"{gateway.url}/metrics") == "TypeError"
        page.goto(f"http://localhost:{port}/")
        assert page.evaluate(REFUSED, f"{gateway.url}/v1/models") == "TypeError"
        gateway.run(gateway.gateway_app.assert_empty())
