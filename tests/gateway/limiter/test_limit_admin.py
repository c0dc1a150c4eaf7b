"""Limits as operators change them: over HTTP, over gRPC and in a terminal, on a gateway that obeys at once."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes import GatewayApp, build_gateway_app
from grpc_app import as_key, open_grpc_app, refused
from served import on_port
from structlog.testing import capture_logs
from typer.testing import CliRunner

from gateway.api_schema.limits import LimitScope, ScopeUse
from gateway.cli.limits import _changes, scope_text
from gateway.cli.main import app as cli
from gateway.core.limits import Limits, Scope
from gateway.pb import limits_pb2 as pb
from gateway.pb.limits_pb2_grpc import LimitAdminStub

CHAT = {"model": "poet", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
LIMITS = "/admin/v1/limits"


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


async def chat(gateway_app: GatewayApp, key: str = "sk-acme"):
    async with gateway_app.client(key) as client:
        return await client.post("/v1/chat/completions", json=CHAT)


async def test_a_change_over_http_binds_on_the_next_request(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        assert (await chat(gateway_app)).status_code == 200
        changed = await client.patch(LIMITS, json={"tenant": "acme", "tokens_per_day": 3})
        assert changed.json()["tokens_per_day"] == 3
        refusal = await chat(gateway_app)
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (429, "insufficient_quota")
        assert refusal.headers["x-should-retry"] == "false"
        await client.patch(LIMITS, json={"tenant": "acme", "shadow": ["tokens_per_day"]})
        assert (await chat(gateway_app)).status_code == 200
        await client.patch(LIMITS, json={"tenant": "acme", "tokens_per_day": None, "shadow": []})
        assert (await chat(gateway_app)).status_code == 200
    await gateway_app.assert_empty()


async def test_what_is_set_and_what_is_used_can_be_read(gateway_app):
    assert (await chat(gateway_app, "sk-globex")).status_code == 404, "poet is not for globex"
    async with gateway_app.client("sk-globex") as client:
        assert (await client.post("/v1/chat/completions", json={**CHAT, "model": "pirate"})).status_code == 200
    async with gateway_app.client("sk-admin") as client:
        await client.patch(LIMITS, json={"tenant": "globex", "adapter": "pirate", "concurrent_requests": 2})
        entries = (await client.get(LIMITS, params={"tenant": "globex"})).json()["limits"]
        assert [(entry["key"], entry["adapter"], entry["source"]) for entry in entries] == [
            ("", "", "config"),
            ("*", "", "config"),
            ("", "*", "config"),
            ("", "pirate", "live"),
        ]
        assert {entry["tenant"] for entry in (await client.get(LIMITS)).json()["limits"]} == {"acme", "globex"}
        usage = (await client.get(f"{LIMITS}/usage", params={"tenant": "globex"})).json()["usage"]
    by_name = {limit["name"]: limit for limit in usage[0]["limits"]}
    assert (usage[0]["tenant"], by_name["requests_per_minute"]["limit"]) == ("globex", 3)
    assert 0 < by_name["requests_per_minute"]["used"] <= 1
    assert by_name["tokens_per_day"]["used"] > 0
    assert usage[-1]["adapter"] == "pirate"


async def test_resetting_returns_to_the_configuration_or_forgets_what_is_used(gateway_app):
    globex = {"tenant": "globex"}
    async with gateway_app.client("sk-admin") as client:
        await client.patch(LIMITS, json={**globex, "requests_per_minute": 1})
        body = {**CHAT, "model": "pirate"}
        async with gateway_app.client("sk-globex") as caller:
            assert [(await caller.post("/v1/chat/completions", json=body)).status_code for _ in range(2)] == [200, 429]
            forgotten = await client.post(f"{LIMITS}/reset", json={**globex, "used": True})
            assert forgotten.json()["requests_per_minute"] == 1
            assert [(await caller.post("/v1/chat/completions", json=body)).status_code for _ in range(2)] == [200, 429]
        restored = await client.post(f"{LIMITS}/reset", json=globex)
        assert (restored.json()["requests_per_minute"], restored.json()["tokens_per_minute"]) == (3, 200)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"tenant": "unknown", "tokens_per_day": 1}, 404, "tenant"),
        ({"tokens_per_day": 1}, 400, "tenant"),
        ({"tenant": "acme"}, 400, None),
        ({"tenant": "acme", "tokens_per_day": 0}, 400, "tokens_per_day"),
        ({"tenant": "acme", "tokens_per_day": "many"}, 400, "tokens_per_day"),
        ({"tenant": "acme", "shadow": ["tokens"]}, 400, "shadow"),
        ({"tenant": "acme", "key": "k", "adapter": "poet", "tokens_per_day": 1}, 400, "key"),
        ({"tenant": "acme", "key": "k" * 300, "tokens_per_day": 1}, 400, "key"),
        ({"tenant": "acme", "tokens_per_day": 1, "tokens_per_minut": 1}, 400, "tokens_per_minut"),
    ],
)
async def test_nonsense_is_refused_by_name_and_changes_nothing(gateway_app, body, status, param):
    async with gateway_app.client("sk-admin") as client:
        response = await client.patch(LIMITS, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert await gateway_app.limiter.limits(Scope("acme")) == Limits()


@pytest.mark.parametrize(
    ("method", "path", "misspelt"),
    [("GET", LIMITS, "tennant"), ("GET", f"{LIMITS}/usage", "tennant"), ("POST", f"{LIMITS}/reset", "usd")],
)
async def test_what_is_misspelt_is_not_passed_over(gateway_app, method, path, misspelt):
    """A misspelt filter that was ignored would show an operator the limits of all tenants."""
    where = "params" if method == "GET" else "json"
    async with gateway_app.client("sk-admin") as client:
        response = await client.request(method, path, **{where: {"tenant": "acme", misspelt: "x"}})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, misspelt)
    assert repr(misspelt) in error["message"]


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("PATCH", ""), ("POST", "/reset"), ("GET", "/usage")])
async def test_no_tenants_key_opens_it(gateway_app, method, path):
    async with gateway_app.client("sk-acme") as client:
        response = await client.request(method, LIMITS + path, json={"tenant": "acme", "tokens_per_day": 1})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
    assert await gateway_app.limiter.limits(Scope("acme")) == Limits()


async def test_limits_in_shadow_are_counted_in_metrics(gateway_app):
    await gateway_app.limiter.set_limits(Scope("acme"), {"tokens_per_day": 1, "shadow": ["tokens_per_day"]})
    assert (await chat(gateway_app)).status_code == 200
    async with gateway_app.client("sk-admin") as client:
        text = (await client.get("/metrics")).text
    assert 'loralane_limiter_shadow_refusals_total{limit="tokens_per_day",scope="tenant"} 1.0' in text
    assert gateway_app.watcher.records[0].bill.shadowed == (("tenant", "tokens_per_day"),)


async def test_everything_over_grpc(tmp_path):
    async with open_grpc_app(tmp_path) as grpc_app:
        stub, admin = limit_stub(grpc_app), as_key("admin")
        scope = pb.LimitScope(tenant="acme", key="*")
        request = pb.SetLimitsRequest(
            scope=scope, limits=pb.Limits(tokens_per_minute=100, shadow=["tokens_per_minute"])
        )
        entry = await stub.Set(request, metadata=admin)
        assert (entry.source, entry.limits.tokens_per_minute, list(entry.limits.shadow)) == (
            "live",
            100,
            ["tokens_per_minute"],
        )
        lift = pb.SetLimitsRequest(scope=scope, lift=["tokens_per_minute"], set_shadow=True)
        assert await stub.Set(lift, metadata=admin) == pb.LimitEntry(scope=scope, limits=pb.Limits(), source="live")
        entries = (await stub.Get(pb.GetLimitsRequest(tenant="globex"), metadata=admin)).entries
        assert entries[0].limits == pb.Limits(requests_per_minute=3, tokens_per_minute=200)
        usage = (await stub.Usage(pb.LimitUsageRequest(tenant="globex"), metadata=admin)).scopes
        assert [limit.limit for limit in usage[0].limits] == [3, 200]
        reset = await stub.Reset(pb.ResetLimitsRequest(scope=pb.LimitScope(tenant="globex")), metadata=admin)
        assert (reset.limits.tokens_per_minute, reset.source) == (200, "config")


async def test_watching_shows_a_change_of_limits(tmp_path):
    async with open_grpc_app(tmp_path) as grpc_app:
        stub = limit_stub(grpc_app)
        call = stub.Watch(pb.WatchLimitsRequest(tenant="globex", interval_seconds=0.1), metadata=as_key("admin"))
        first = await call.read()
        assert [limit.limit for limit in first.scopes[0].limits] == [3, 200]
        await grpc_app.gateway_app.limiter.set_limits(Scope("globex"), {"tokens_per_minute": 77})
        async with asyncio.timeout(30):
            changed = await call.read()
        assert [limit.limit for limit in changed.scopes[0].limits] == [3, 77]
        call.cancel()


async def test_over_grpc_too_no_tenants_key_opens_it(tmp_path):
    async with open_grpc_app(tmp_path) as grpc_app:
        stub = limit_stub(grpc_app)
        scope = pb.LimitScope(tenant="acme")
        for call in (
            stub.Get(pb.GetLimitsRequest(), metadata=as_key("acme")),
            stub.Set(pb.SetLimitsRequest(scope=scope, lift=["tokens_per_day"]), metadata=as_key("acme")),
            stub.Reset(pb.ResetLimitsRequest(scope=scope), metadata=as_key("acme")),
            stub.Usage(pb.LimitUsageRequest(), metadata=as_key("acme")),
            stub.Watch(pb.WatchLimitsRequest(), metadata=as_key("acme")).read(),
        ):
            assert (await refused(call)).code == "PERMISSION_DENIED"
        unknown = await refused(stub.Usage(pb.LimitUsageRequest(tenant="unknown"), metadata=as_key("admin")))
        assert (unknown.code, unknown.reason) == ("NOT_FOUND", "TENANT_NOT_FOUND")


async def test_the_same_in_a_terminal(tmp_path):
    async with open_grpc_app(tmp_path) as grpc_app, on_port(grpc_app.gateway_app) as url:

        async def run(*words: str) -> str:
            target = ["--url", url, "--key", "sk-admin"]
            with capture_logs():  # of the gateway, which is in this process: the audit log
                result = await asyncio.to_thread(CliRunner().invoke, cli, ["limits", *words, *target])
            return result.output

        changes = ["--tokens-per-day", "50_000", "--concurrent-requests", "4", "--shadow", "tokens-per-day"]
        changed = await run("set", "acme", *changes)
        assert "(50,000)" in changed
        assert "live" in changed
        limits = await grpc_app.gateway_app.limiter.limits(Scope("acme"))
        assert limits == Limits(None, None, 4, 50_000, ("tokens_per_day",))
        [entry] = [one for one in json.loads(await run("get", "acme", "--json")) if one["source"] == "live"]
        assert entry["concurrent_requests"] == 4
        assert "tokens_per_minute" in await run("usage", "globex")
        assert json.loads(await run("usage", "--json"))[0]["tenant"] == "acme"
        assert "4" not in (await run("set", "acme", "--concurrent-requests", "none")).splitlines()[1].split()
        assert "config" in await run("reset", "acme")
        [reset] = json.loads(await run("reset", "acme", "--json"))
        assert reset == json.loads(await run("get", "acme", "--json"))[0]
        assert await grpc_app.gateway_app.limiter.limits(Scope("acme")) == Limits()
        assert "there is no tenant 'unknown'" in await run("get", "unknown")
        assert "is no whole number" in await run("set", "acme", "--tokens-per-day", "lots")


def test_watching_tells_everything_first_and_then_what_has_changed(monkeypatch):
    monkeypatch.setattr("gateway.cli.limits.WATCH_SECONDS", 0.0)
    first, second = (ScopeUse(name, "", "", limits=[], refused_at=None, refused_by=[]) for name in ("a", "b"))
    changed = ScopeUse("b", "", "", limits=[], refused_at=5.0, refused_by=["tokens_per_day"])
    looks = iter([[first, second], [first, second], [first, changed]])
    changes = _changes(lambda: next(looks))
    assert next(changes) == [first, second]
    assert next(changes) == [changed]


def test_scopes_have_names_in_tables():
    scopes = [LimitScope("t", "", ""), LimitScope("t", "k", ""), LimitScope("t", "", "*")]
    assert [scope_text(scope) for scope in scopes] == ["all", "key k", "adapter *"]


def limit_stub(grpc_app) -> LimitAdminStub:
    return LimitAdminStub(grpc_app.channel)
