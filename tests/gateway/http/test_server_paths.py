"""Tenants read no paths of the server: the reasons why an adapter is not served are for administrators."""

from __future__ import annotations

import shutil

import pytest
from fakes import GatewayApp, build_gateway_app

MESSAGES = [{"role": "user", "content": "hi"}]
ASKED = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "hi"},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    """Serves the adapter poet, whose folder was gone when the engine was restarted."""
    app = await build_gateway_app(tmp_path)
    shutil.rmtree(tmp_path / "poet")
    await app.adapters.restore()
    return app


@pytest.mark.parametrize("path", ASKED)
async def test_no_answer_to_a_tenant_has_a_path(path, gateway_app, tmp_path):
    async with gateway_app.client() as client:
        for model in ("poet", str(tmp_path / "poet")):
            for stream in ({}, {"stream": True}):
                answer = await client.post(path, json={"model": model, **ASKED[path], **stream})
                assert model == str(tmp_path / "poet") or str(tmp_path) not in answer.text
        if "tokens" not in path and path != "/tokenize":
            refused = await client.post(path, json={"model": "poet", **ASKED[path]})
            assert refused.status_code == 503 and "its operator sees why" in refused.text


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/poet", "/ready", "/health", "/version"])
async def test_nothing_that_a_tenant_may_read_has_a_path(path, gateway_app, tmp_path):
    async with gateway_app.client() as client:
        assert str(tmp_path) not in (await client.get(path)).text


async def test_administrators_read_the_reason(gateway_app, tmp_path):
    async with gateway_app.client("sk-admin") as client:
        shown = (await client.get("/admin/v1/adapters/poet")).json()
    assert str(tmp_path / "poet") in shown["error"]
