"""Lanes and live requests as operators see and stop them: over HTTP, over gRPC and in a terminal."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import quote

import grpc
import pytest
from fakes import BASE, DEFAULT_GOALS, GatewayApp, build_gateway_app
from grpc_app import as_key, open_grpc_app, refused
from prometheus_client import CollectorRegistry, Histogram
from served import on_port
from typer.testing import CliRunner

from engine.core.messages.requests import Lane, LaneMode, Origin, Request, SamplingParams
from engine.rpc.stream import EngineDrained
from gateway.cli.main import app as cli
from gateway.core.shared_poll import SharedPoll
from gateway.observe.latency import ITL, TTFT, LatencyWindow, percentile
from gateway.observe.metrics import Metrics
from gateway.pb import generation_pb2 as generation
from gateway.pb import operations_pb2 as pb
from gateway.pb.operations_pb2_grpc import EngineAdminStub, LaneAdminStub, RequestAdminStub
from tests.gateway.http.test_http_disconnect import until

CHAT = {"model": "captain", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
ADMIN = "/admin/v1"


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


@asynccontextmanager
async def busy(gateway_app: GatewayApp, count: int = 1, **fields):
    """Requests that have their first token and wait for more; yields the tasks that wait for their answers."""
    gateway_app.engine.go_on = asyncio.Event()
    async with gateway_app.client() as client:
        tasks = [asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | fields)) for _ in range(count)]
        await until(lambda: sum(gateway_app.engine.generated.values()) == count * fields.get("n", 1))
        yield tasks
        gateway_app.engine.go_on.set()
        await asyncio.gather(*tasks)
    await gateway_app.assert_empty()


async def test_live_requests_are_those_of_the_engine(gateway_app):
    async with busy(gateway_app, n=2, service_tier="flex"), gateway_app.client("sk-admin") as client:
        answer = (await client.get(f"{ADMIN}/requests")).json()
        (request,) = answer["requests"]
        (record,) = gateway_app.gateway.live.values()
        assert (request["id"], request["request_id"], answer["total"]) == (record.id, record.request_id, 2)
        assert (request["tenant"], request["key"], request["lane"]) == ("acme", record.caller.key_id, "batch")
        assert (request["model"], request["adapter"], request["state"]) == ("captain", "pirate", "running")
        assert (request["answers"], request["generated_tokens"], request["max_tokens"]) == (2, 2, 40)
        tenants = (await client.get(f"{ADMIN}/overview", params={"sections": "tenants"})).json()["tenants"]
        assert {row["tenant"]: row["reserved_tokens"] for row in tenants} == {
            "acme": record.bill.reserved_tokens // 2 * 2,
            "globex": 0,
        }


@pytest.mark.parametrize("n", [1, 2])
async def test_cancelling_ends_a_request_once_and_settles_what_it_used(gateway_app, n):
    async with busy(gateway_app, n=n) as (task,), gateway_app.client("sk-admin") as client:
        (record,) = gateway_app.gateway.live.values()
        done = await client.post(f"{ADMIN}/requests/{record.id[:8]}/cancel")
        assert done.json()["cancelled"]["id"] == record.id
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "preempted")
        assert (answer.headers["x-should-retry"], "retry-after" in answer.headers) == ("false", False)
        gone = await client.post(f"{ADMIN}/requests/{record.id}/cancel")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")
    assert list(gateway_app.limiter.ends.values()) == [[record.work.prompt_tokens + record.work.completion_tokens]]
    assert record.work.completion_tokens == n


async def test_a_beginning_of_several_ids_cancels_none(gateway_app):
    ids = ("abcdef01", "abcdef02", "abcdef0")
    gateway_app.engine.requests = [Request(f"{name}-0", (1,), SamplingParams(), origin=Origin(name)) for name in ids]
    async with gateway_app.client("sk-admin") as client:
        found = {name: await client.post(f"{ADMIN}/requests/{name}/cancel") for name in ("abcdef", "abcde", "abcdef0")}
    assert {name: answer.status_code for name, answer in found.items()} == {"abcdef": 400, "abcde": 404, "abcdef0": 200}
    assert gateway_app.engine.cancelled == {"abcdef0-0"}, "a whole id is one, whatever else begins with it"


async def test_lanes_are_paused_drained_and_opened(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        for action, mode in (("pause", LaneMode.PAUSED), ("drain", LaneMode.DRAINING), ("resume", LaneMode.OPEN)):
            changed = (await client.post(f"{ADMIN}/lanes/batch/{action}")).json()
            assert (changed["lane"], changed["mode"]) == ("batch", mode.value)
            listed = (await client.get(f"{ADMIN}/lanes")).json()["lanes"]
            assert [lane["mode"] for lane in listed] == ["open", mode.value]
            assert gateway_app.engine.modes[Lane.BATCH] is mode
        unknown = await client.post(f"{ADMIN}/lanes/fast/pause")
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "lane")


async def test_percentiles_are_of_what_callers_saw(gateway_app):
    async with gateway_app.client() as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    async with gateway_app.client("sk-admin") as client:
        interactive, batch = (await client.get(f"{ADMIN}/lanes")).json()["lanes"]
    assert interactive["ttft_seconds"]["count"] == 1
    assert 0 < interactive["ttft_seconds"]["p50"] <= interactive["ttft_seconds"]["p99"]
    assert batch["ttft_seconds"] == {"p50": None, "p95": None, "p99": None, "count": 0}


async def test_an_overview_has_the_sections_that_were_asked_for(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        whole = (await client.get(f"{ADMIN}/overview")).json()
        assert list(whole) == ["models", "engine", "lanes", "requests", "tenants", "adapters"]
        assert list((await client.get(f"{ADMIN}/overview", params={"sections": "lanes,engine"})).json()) == [
            "lanes",
            "engine",
        ]
        wrong = await client.get(f"{ADMIN}/overview", params={"sections": "lanes,secrets"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "sections")
        gateway_app.engine.ready = False
        away = await client.get(f"{ADMIN}/requests")
        assert away.status_code == 200, "a second has not passed"
        gateway_app.operations.of()._requests.forget()
        away = await client.get(f"{ADMIN}/requests")
    assert (away.status_code, away.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_many_who_look_cost_the_engine_one_look(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        answers = await asyncio.gather(*[client.get(f"{ADMIN}/overview") for _ in range(20)])
    assert {answer.status_code for answer in answers} == {200}
    assert gateway_app.engine.looks == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "lanes"),
        ("POST", "lanes/batch/pause"),
        ("GET", "requests"),
        ("POST", "requests/x/cancel"),
        ("GET", "overview"),
    ],
)
async def test_operating_is_for_administrators_and_never_cached(gateway_app, method, path):
    for key, status in (("sk-acme", 403), (None, 401)):
        async with gateway_app.client(key) as client:
            assert (await client.request(method, f"{ADMIN}/{path}")).status_code == status
    async with gateway_app.client("sk-admin") as client:
        answer = await client.request(method, f"{ADMIN}/{path}")
    assert answer.status_code == 404 or answer.headers["cache-control"] == "no-store"


async def test_the_page_is_for_anyone_and_has_no_data(gateway_app):
    async with gateway_app.client(None) as client:
        page = await client.get("/console")
        script = await client.get("/console/app.js")
        for path in ("/console/nothing.js", "/console/__init__.py", "/console/%2e%2e%2fcli.py"):
            assert (await client.get(path)).status_code == 404
    for answer, kind in ((page, "text/html"), (script, "text/javascript")):
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_the_same_over_grpc(tmp_path):
    async with open_grpc_app(tmp_path) as grpc_app:
        gateway_app, admin = grpc_app.gateway_app, as_key("admin")
        gateway_app.engine.go_on = asyncio.Event()
        lanes, requests = LaneAdminStub(grpc_app.channel), RequestAdminStub(grpc_app.channel)
        chat = generation.GenerateRequest(model="poet", prompt="hi", sampling={"max_tokens": 20})
        call = asyncio.ensure_future(grpc_app.generation.Generate(chat, metadata=as_key("acme")))
        await until(lambda: sum(gateway_app.engine.generated.values()) == 1)
        (live,) = (await requests.List(pb.ListRequestsRequest(), metadata=admin)).requests
        assert (live.model, live.tenant, live.generated_tokens) == ("poet", "acme", 1)
        assert (await requests.Cancel(pb.CancelRequestRequest(id=live.id), metadata=admin)).id == live.id
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await call
        assert told.value.code() is grpc.StatusCode.ABORTED
        assert (await lanes.Set(pb.SetLaneRequest(lane="batch", action="drain"), metadata=admin)).mode == "draining"
        assert [lane.mode for lane in (await lanes.List(pb.ListLanesRequest(), metadata=admin)).lanes] == [
            "open",
            "draining",
        ]
        assert (
            await refused(lanes.Set(pb.SetLaneRequest(lane="batch", action="stop"), metadata=admin))
        ).code == "INVALID_ARGUMENT"
        assert (
            await refused(requests.List(pb.ListRequestsRequest(), metadata=as_key("acme")))
        ).code == "PERMISSION_DENIED"
        await grpc_app.assert_empty()


async def test_the_same_in_a_terminal(tmp_path):
    async with open_grpc_app(tmp_path) as grpc_app, busy(grpc_app.gateway_app) as (task,):
        shown = await run(grpc_app, "requests", "ls", "--json")
        (request,) = json.loads(shown)
        assert request["adapter"] == "pirate"
        assert request["id"][:12] in await run(grpc_app, "requests", "ls")
        assert "is cancelled, after 1 of 20 tokens" in await run(grpc_app, "requests", "cancel", request["id"][:9])
        assert (await task).status_code == 503
        assert "batch is paused" in await run(grpc_app, "lanes", "pause", "batch")
        assert "paused" in await run(grpc_app, "lanes", "ls")
        assert "batch is draining" in await run(grpc_app, "lanes", "drain", "batch")
        assert "batch is open" in await run(grpc_app, "lanes", "resume", "batch")
        assert "no live request" in await run(grpc_app, "requests", "cancel", "abcdef", status=1)


async def test_engines_are_drained_resumed_and_restarted(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        (engine,) = (await client.get(f"{ADMIN}/engines")).json()["engines"]
        assert (engine["name"], engine["state"], engine["base_model"]) == ("engine-0", "serving", BASE)
        drained = await client.post(f"{ADMIN}/engines/engine-0/drain")
        assert (drained.status_code, drained.json()["state"]) == (200, "draining")
        assert (await client.post(f"{ADMIN}/engines/engine-0/resume")).json()["state"] == "serving"
        for query, seconds in ({}, 60), ({"seconds": "5", "model": BASE}, 5):
            await client.post(f"{ADMIN}/engines/engine-0/restart", params=query)
            assert gateway_app.engine.restarts[-1] == seconds
        for wrong in ("engine-9/drain", "engine-0/restart?seconds=-1", "engine-0/drain?model=other"):
            assert (await client.post(f"{ADMIN}/engines/{wrong}")).status_code == 400
        gateway_app.engine.ready = False
        assert (await client.post(f"{ADMIN}/engines/engine-0/drain")).json()["error"]["code"] == "engine_unavailable"
    async with gateway_app.client("sk-acme") as client:
        assert (await client.get(f"{ADMIN}/engines")).status_code == 403
        assert (await client.post(f"{ADMIN}/engines/engine-0/drain")).status_code == 403


async def test_engines_over_grpc_and_in_a_terminal(tmp_path):
    async with open_grpc_app(tmp_path) as grpc_app:
        engines, admin = EngineAdminStub(grpc_app.channel), as_key("admin")
        (engine,) = (await engines.List(pb.ListEnginesRequest(), metadata=admin)).engines
        assert (engine.name, engine.predicted_wait_seconds) == ("engine-0", 0.5)
        for wrong in ({"action": "stop"}, {"action": "restart", "seconds": 1e9}):
            request = pb.SetEngineRequest(engine="engine-0", **wrong)
            assert (await refused(engines.Set(request, metadata=admin))).code == "INVALID_ARGUMENT"
        denied = await refused(engines.List(pb.ListEnginesRequest(), metadata=as_key("acme")))
        assert denied.code == "PERMISSION_DENIED"
        assert "engine-0 is draining" in await run(grpc_app, "engines", "drain", "engine-0")
        assert "draining" in await run(grpc_app, "engines", "ls")
        assert "engine-0 is serving" in await run(grpc_app, "engines", "resume", "engine-0")
        restarted = await run(grpc_app, "engines", "restart", "engine-0", "--seconds", "7")
        assert "no other engine serves" in restarted
        assert grpc_app.gateway_app.engine.restarts == [7.0]
        assert "there is no engine" in await run(grpc_app, "engines", "drain", "engine-9", status=1)


async def test_draining_or_restarting_the_only_engine_says_what_that_means(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        for action, words in (("drain", "no other engine serves tiny"), ("restart", "next process"), ("resume", "")):
            notice = (await client.post(f"{ADMIN}/engines/engine-0/{action}")).json()["notice"]
            assert words in notice and bool(words) == bool(notice)
        assert (await client.get(f"{ADMIN}/engines")).json()["engines"][0]["notice"] == ""


async def test_engines_whose_names_are_addresses_are_found_by_their_quoted_names(gateway_app):
    gateway_app.engine.added = [("[::1]:7001", "[::1]:7001", "configuration")]
    async with gateway_app.client("sk-admin") as client:
        drained = await client.post(f"{ADMIN}/engines/{quote('[::1]:7001', safe='')}/drain")
        assert (drained.status_code, drained.json()["name"]) == (200, "[::1]:7001")


async def test_engines_are_added_and_removed_over_http(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        body = {"name": "gpu:2", "address": "127.0.0.1:7001"}
        added = await client.post(f"{ADMIN}/engines", json=body)
        assert added.status_code == 201
        assert (added.json()["name"], added.json()["added_by"]) == ("gpu:2", "operator")
        again = await client.post(f"{ADMIN}/engines", json=body)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "engine_conflict")
        other = {"name": "gpu-3", "address": "127.0.0.1:7002"}
        for wrong in ({"name": "a/b"}, {"address": "gpu2:7001"}, {"address": "unix:/x"}, {"model": "other"}, {"x": 1}):
            assert (await client.post(f"{ADMIN}/engines", json=other | wrong)).status_code == 400
        assert (await client.post(f"{ADMIN}/engines/gpu%3A2/drain")).json()["name"] == "gpu:2"
        assert (await client.delete(f"{ADMIN}/engines/gpu%3A2")).json() == {"deleted": True}
        names = [engine["name"] for engine in (await client.get(f"{ADMIN}/engines")).json()["engines"]]
        assert names == ["engine-0"]
        assert (await client.delete(f"{ADMIN}/engines/engine-0")).status_code == 400
    async with gateway_app.client("sk-acme") as client:
        assert (await client.post(f"{ADMIN}/engines", json=body)).status_code == 403
        assert (await client.delete(f"{ADMIN}/engines/gpu%3A2")).status_code == 403


async def test_engines_are_added_and_removed_over_grpc_and_in_a_terminal(tmp_path):
    async with open_grpc_app(tmp_path) as grpc_app:
        engines, admin = EngineAdminStub(grpc_app.channel), as_key("admin")
        request = pb.AddEngineRequest(engine="gpu-2", address="127.0.0.1:7001")
        assert (await engines.Add(request, metadata=admin)).added_by == "operator"
        assert (await refused(engines.Add(request, metadata=admin))).code == "ALREADY_EXISTS"
        assert (await refused(engines.Add(request, metadata=as_key("acme")))).code == "PERMISSION_DENIED"
        await engines.Remove(pb.RemoveEngineRequest(engine="gpu-2"), metadata=admin)
        assert "gpu-2 is added" in await run(grpc_app, "engines", "add", "gpu-2", "127.0.0.1:7001")
        assert "needs tls" in await run(grpc_app, "engines", "add", "gpu-3", "gpu3:7001", status=1)
        assert "gpu-2 is removed" in await run(grpc_app, "engines", "remove", "gpu-2")
        assert "no engine 'gpu-2' was added" in await run(grpc_app, "engines", "remove", "gpu-2", status=1)


async def run(grpc_app, *words, status=0) -> str:
    async with on_port(grpc_app.gateway_app) as url:
        args = [*words, "--url", url, "--key", "sk-admin"]
        result = await asyncio.to_thread(CliRunner().invoke, cli, args)
    assert result.exit_code == status, result.output
    return result.output


async def test_a_glance_is_shared_refreshed_and_forgets_failures():
    now, looks = 0.0, []

    async def look() -> int:
        looks.append(now)
        if now == 1.5:
            raise OSError("away")
        await asyncio.sleep(0)
        return len(looks)

    glance = SharedPoll(look, 1.0, lambda: now)
    assert await asyncio.gather(glance.get(), glance.get()) == [1, 1]
    now = 1.5
    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            await glance.get()
    now = 1.6
    assert await glance.get() == 4
    glance.forget()
    assert await glance.get() == 5


async def test_one_who_leaves_takes_no_glance_from_others():
    go_on = asyncio.Event()

    async def look() -> str:
        await go_on.wait()
        return "seen"

    glance = SharedPoll(look)
    impatient, patient = asyncio.create_task(glance.get()), asyncio.create_task(glance.get())
    await asyncio.sleep(0)
    impatient.cancel()
    go_on.set()
    assert await patient == "seen"


def test_latencies_are_of_the_last_minutes():
    now, metrics = 0.0, Metrics({BASE: DEFAULT_GOALS})
    window = LatencyWindow(metrics.collect, lambda: now)
    for _ in range(100):
        metrics.inter_token(BASE, Lane.BATCH, 2.0)
    assert window.read().get(ITL, BASE, Lane.BATCH).count == 100
    for now in range(10, 400, 10):  # noqa: B007 - the clock
        metrics.inter_token(BASE, Lane.BATCH, 0.04)
        seen = window.read()
    assert 300 <= seen.window_seconds <= 310
    found = seen.get(ITL, BASE, Lane.BATCH)
    assert found.count == 30 and found.p99 < 0.06, "what was slow is long ago"
    assert seen.get(TTFT, BASE, Lane.BATCH).count == 0


async def test_charts_are_of_the_percentile_that_a_lane_promises(gateway_app):
    for seconds in (*[0.01] * 85, *[0.9] * 15):
        gateway_app.metrics.inter_token(BASE, Lane.INTERACTIVE, seconds)
        gateway_app.metrics.inter_token(BASE, Lane.BATCH, seconds)
    promised = {lane: goals.attainment for lane, goals in gateway_app.metrics.static.goals[BASE].items()}
    assert promised == {Lane.INTERACTIVE: 0.99, Lane.BATCH: 0.0}
    found = gateway_app.operations.of().latencies_at_goal()
    assert 0.9 < found["interactive.itl_at_goal"] <= 1.0 and 0.5 < found["batch.itl_at_goal"] < 0.9
    assert found["batch.ttft_at_goal"] is None
    goals = gateway_app.metrics.static.goals[BASE]
    changed = {**goals, Lane.INTERACTIVE: replace(goals[Lane.INTERACTIVE], attainment=0.8)}
    gateway_app.metrics.static.goals = {BASE: changed}
    assert gateway_app.operations.of().latencies_at_goal()["interactive.itl_at_goal"] < 0.02


def test_percentiles_lie_where_their_bucket_does():
    registry = CollectorRegistry()
    histogram = Histogram(TTFT, "x", ["model_name", "lane"], buckets=(1.0, 2.0, 4.0), registry=registry)
    window = LatencyWindow(registry.collect, lambda: 0.0)
    for value in (0.5, 0.5, 1.5, 3.0, 100.0):
        histogram.labels(BASE, "interactive").observe(value)
    found = window.read().get(TTFT, BASE, Lane.INTERACTIVE)
    assert (found.count, found.p50, found.p99) == (5, pytest.approx(1.5), 4.0)
    assert percentile([(1.0, 0.0), (2.0, 10.0), (float("inf"), 10.0)], 0.5) == pytest.approx(1.5)


async def test_an_engine_that_a_signal_drains_cannot_be_resumed(gateway_app, monkeypatch):
    async def drain(name, draining, **_):
        raise EngineDrained("the engine was told to end by a signal")

    monkeypatch.setattr(gateway_app.engine, "drain", drain)
    async with gateway_app.client("sk-admin") as client:
        answer = await client.post(f"{ADMIN}/engines/engine-0/resume")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "engine")
    assert answer.json()["error"]["message"] == "the engine was told to end by a signal; its drain cannot be ended"
