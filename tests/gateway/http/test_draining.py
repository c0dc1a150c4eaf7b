"""A gateway that drains: what its ports answer, first and then, and what administrators ask of it."""

from __future__ import annotations

import pytest
from fakes import BASE, GatewayApp, build_gateway_app

from gateway.core.lifecycle import Lifecycle

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


async def test_a_gateway_that_drains_says_so_and_serves_at_first(gateway_app):
    async with gateway_app.client() as client:
        before = await client.post("/v1/chat/completions", json=CHAT)
        assert (before.status_code, before.headers.get("connection")) == (200, None)
        assert (await client.get("/ready")).status_code == 200
        gateway_app.gateway.lifecycle.drain()
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["status"], ready.json()["reason"]) == (503, "not_ready", "draining")
        assert (await client.get(f"/ready?model={BASE}")).status_code == 503
        after = await client.post("/v1/chat/completions", json=CHAT)
        assert (after.status_code, after.headers["connection"]) == (200, "close")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/files", "/v1/batches"])
async def test_later_it_refuses_what_tenants_send(gateway_app, path):
    gateway_app.gateway.lifecycle.drain()
    gateway_app.gateway.lifecycle.refuse()
    async with gateway_app.client() as client:
        refused = await client.post(path, json=CHAT)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-loralane-draining"] == "true"
        assert refused.headers["connection"] == "close"
        assert "draining" in refused.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 503
    async with gateway_app.client("sk-admin") as administrator:
        assert (await administrator.get("/admin/v1/lanes")).status_code == 200


async def test_a_drain_waits_for_requests_and_not_for_probes():
    life = Lifecycle()
    await life.wait_idle()
    with life.working(), life.working():
        assert not life._idle.is_set()
    await life.wait_idle()


async def test_a_drain_has_one_beginning():
    now = [10.0]
    life = Lifecycle(clock=lambda: now[0])
    assert life.since == 10.0
    now[0] = 20.0
    life.drain()
    now[0] = 30.0
    life.drain(alone=True)
    assert (life.since, life.is_alone) == (20.0, False)


async def test_administrators_see_and_drain_a_gateway(gateway_app):
    async with gateway_app.client("sk-admin") as administrator, gateway_app.client() as tenant:
        own = gateway_app.gateway.lifecycle.id
        path = f"/admin/v1/gateways/{own}/drain"
        assert (await tenant.post(path)).status_code == 403
        wrong = await administrator.post(f"{path}?stop=yes")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "stop")
        assert not gateway_app.gateway.lifecycle.is_draining
        told = (await administrator.post(f"{path}?stop=true")).json()
        assert (told["id"], told["state"]) == (own, "draining")
        assert gateway_app.gateway.lifecycle.ending.is_set()
