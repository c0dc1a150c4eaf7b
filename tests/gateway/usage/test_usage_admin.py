"""Usage as operators read it: over HTTP, over gRPC and in a terminal, and as no other caller can."""

from __future__ import annotations

import asyncio
import csv
import json
import threading
from collections import Counter
from decimal import Decimal
from io import StringIO

import pytest
from fakes import BILLING, DEVICE_SECONDS, FakeBooks, GatewayApp, build_gateway_app
from grpc_app import as_key, open_grpc_app, refused
from served import on_port
from typer.testing import CliRunner

from gateway.cli.main import app as cli
from gateway.core.tenants import hash_key, key_id
from gateway.core.usage import today
from gateway.http.routes.admin import usage as http_usage
from gateway.pb import usage_pb2 as pb
from gateway.pb.usage_pb2_grpc import UsageAdminStub
from gateway.rpc import usage as grpc_usage
from gateway.usage.report import UsageAdmin, UsageTally, parse_query

USAGE = "/admin/v1/usage"
CALLS = [
    ("sk-acme", "pirate", "priority"),
    ("sk-acme", "captain", "flex"),
    ("sk-acme", "poet", "flex"),
    ("sk-acme", "tiny", "flex"),
    ("sk-globex", "pirate", "priority"),
]


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    gateway_app = await build_gateway_app(tmp_path)
    gateway_app.engine.cached = lambda request: min(3, len(request.prompt_ids) - 1)
    return gateway_app


async def answers(gateway_app: GatewayApp) -> Counter:
    """What callers were told that they used, over several requests."""
    told: Counter = Counter()
    for key, model, tier in CALLS:
        body = {"model": model, "messages": [{"role": "user", "content": "hi " + model}], "max_tokens": 6, "n": 2}
        async with gateway_app.client(key) as client:
            response = await client.post("/v1/chat/completions", json={**body, "service_tier": tier})
        usage = response.json()["usage"]
        told.update(requests=1, prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"])
        told.update(cached_tokens=usage["prompt_tokens_details"]["cached_tokens"])
    return told


async def get(gateway_app: GatewayApp, **params):
    async with gateway_app.client("sk-admin") as client:
        response = await client.get(USAGE, params=params)
    assert response.status_code == 200, response.text
    return response


async def test_usage_is_what_the_answers_said(gateway_app):
    told = await answers(gateway_app)
    report = (await get(gateway_app)).json()
    assert {name: report["total"][name] for name in told} == told
    lines = [(line["tenant"], line["adapter"], line["lane"], line["requests"]) for line in report["usage"]]
    assert lines == [
        ("acme", "pirate", "batch", 1),
        ("acme", "pirate", "interactive", 1),
        ("acme", "poet", "batch", 1),
        ("acme", "tiny", "batch", 1),
        ("globex", "pirate", "interactive", 1),
    ]
    assert report["total"]["device_seconds"] == pytest.approx(told["completion_tokens"] * DEVICE_SECONDS)
    assert (report["from"], report["to"]) == (str(today().replace(day=1)), str(today()))
    tiny = report["usage"][3]
    fresh = tiny["prompt_tokens"] - tiny["cached_tokens"]
    expected = (
        fresh * Decimal("0.1") + tiny["cached_tokens"] * Decimal("0.1") + tiny["completion_tokens"] * Decimal("0.4")
    )
    assert Decimal(tiny["amount"]) == expected / 10**6
    assert Decimal(tiny["cost"]) == Decimal(str(tiny["device_seconds"])) * Decimal("3.6") / 3600


async def test_usage_of_a_key_that_was_rotated_is_found_by_the_new_keys_id(gateway_app):
    await answers(gateway_app)
    old = key_id(hash_key("sk-globex"))
    usage = UsageAdmin(FakeBooks(gateway_app.limiter), BILLING, lambda name: {"0123456789ab": old}.get(name, name))
    by_id = [await usage.report(parse_query({"key": name, "group_by": "key"})) for name in (old, "0123456789ab")]
    assert [(line.group["key"], line.counts.requests) for line in by_id[1].lines] == [(old, 1)]
    assert by_id[0].lines == by_id[1].lines


async def test_what_costs_nothing_is_not_counted(gateway_app):
    gateway_app.engine.fail_after = 2
    await answers_of_failures(gateway_app)
    gateway_app.engine.fail_after = None
    async with gateway_app.client("sk-acme") as client:
        assert (await client.post("/v1/chat/completions", json={"model": "unknown", "messages": []})).status_code >= 400
    assert (await get(gateway_app)).json()["total"]["requests"] == 0


async def answers_of_failures(gateway_app: GatewayApp) -> None:
    async with gateway_app.client("sk-acme") as client:
        body = {"model": "poet", "messages": [{"role": "user", "content": "hi"}]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 503


async def test_a_pattern_is_short(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        assert (await client.get(USAGE, params={"adapter": "*" * 256})).status_code == 200
        answer = await client.get(USAGE, params={"adapter": "*" * 257})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "adapter")


async def test_csv_by_parameter_or_accept(gateway_app):
    await answers(gateway_app)
    by_parameter = await get(gateway_app, format="csv", group_by="key,lane", tenant="acme")
    assert by_parameter.headers["content-type"].startswith("text/csv")
    assert f"-{today()}.csv" in by_parameter.headers["content-disposition"]
    lines = list(csv.DictReader(StringIO(by_parameter.text)))
    assert [(line["key"], line["lane"], line["requests"], line["currency"]) for line in lines] == [
        (key_id(hash_key("sk-acme")), "batch", "3", "USD"),
        (key_id(hash_key("sk-acme")), "interactive", "1", "USD"),
    ]
    async with gateway_app.client("sk-admin") as client:
        by_header = await client.get(USAGE, headers={"accept": "text/csv"}, params={"group_by": "none"})
    [line] = csv.DictReader(StringIO(by_header.text))
    assert line["requests"] == "5"


async def test_long_reports_are_priced_and_written_beside_the_streams(tmp_path, monkeypatch):
    here, elsewhere = threading.current_thread(), set()

    def watch(place, name):
        real = getattr(place, name)

        def watched(*args):
            if threading.current_thread() is not here:
                elsewhere.add(name)
            return real(*args)

        monkeypatch.setattr(place, name, watched)

    for place, name in ((http_usage, "report_json"), (http_usage, "report_csv"), (grpc_usage, "report_head")):
        watch(place, name)
    watch(UsageTally, "report")
    async with open_grpc_app(tmp_path) as api:
        await UsageAdminStub(api.channel).Report(pb.UsageReportRequest(), metadata=as_key("admin"))
        for form in ("json", "csv"):
            await get(api.gateway_app, format=form)
    assert elsewhere == {"report_json", "report_csv", "report_head", "report"}


async def test_filters_that_are_misspelt_are_no_bill_for_all_tenants(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        for params, param in (({"tennant": "acme"}, "tennant"), ({"format": "xml"}, "format"), ({"from": "x"}, "from")):
            response = await client.get(USAGE, params=params)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_only_administrators_read_usage(gateway_app):
    for key, status in (("sk-acme", 403), ("sk-globex", 403), (None, 401)):
        async with gateway_app.client(key) as client:
            response = await client.get(USAGE, params={"tenant": "acme"})
        assert response.status_code == status
        assert "usage" not in response.json()


async def test_over_grpc_it_is_the_same(tmp_path):
    async with open_grpc_app(tmp_path) as api:
        told = await answers(api.gateway_app)
        stub = UsageAdminStub(api.channel)
        report = await stub.Report(pb.UsageReportRequest(group_by="lane,adapter"), metadata=as_key("admin"))
        assert [(line.adapter, line.lane, line.requests) for line in report.usage] == [
            ("pirate", "batch", 1),
            ("pirate", "interactive", 2),
            ("poet", "batch", 1),
            ("tiny", "batch", 1),
        ]
        assert (report.total.prompt_tokens, report.total.completion_tokens) == (
            told["prompt_tokens"],
            told["completion_tokens"],
        )
        assert not report.usage[0].HasField("tenant")
        over_http = (await get(api.gateway_app, group_by="lane,adapter")).json()
        assert [line.amount for line in report.usage] == [line["amount"] for line in over_http["usage"]]
        denied = await refused(stub.Report(pb.UsageReportRequest(), metadata=as_key("acme")))
        assert denied.code == "PERMISSION_DENIED"
        bad = await refused(stub.Report(pb.UsageReportRequest(lane="fast"), metadata=as_key("admin")))
        assert (bad.code, bad.fields) == ("INVALID_ARGUMENT", ["lane"])
        await api.assert_empty()


async def test_in_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    async with open_grpc_app(tmp_path) as api, on_port(api.gateway_app) as url:
        await answers(api.gateway_app)
        target = ["--url", url, "--key", "sk-admin"]

        async def run(*arguments: str, exit_code: int = 0) -> str:
            done = await asyncio.to_thread(CliRunner().invoke, cli, ["usage", *arguments, *target])
            assert done.exit_code == exit_code, done.output
            return done.stdout

        table = await run()
        assert [word in table for word in ("globex", "poet", "interactive", "amount, USD", "total")] == [True] * 5
        report = json.loads(await run("--json", "--by", "tenant", "--lane", "interactive"))
        assert [(line["tenant"], line["requests"]) for line in report["usage"]] == [("acme", 1), ("globex", 1)]
        assert report == (await get(api.gateway_app, group_by="tenant", lane="interactive")).json()
        as_csv = await run("--csv", "--by", "tenant,key", "--adapter", "po*")
        assert as_csv == (await get(api.gateway_app, group_by="tenant,key", adapter="po*", format="csv")).text.replace(
            "\r", ""
        )
        assert "5" in await run("--by", "none")
        await run("--from", "never", exit_code=1)
        await run("--csv", "--json", exit_code=2)
        help_text = await asyncio.to_thread(CliRunner().invoke, cli, ["usage", "--help"])
        assert "loralane usage --tenant acme" in help_text.stdout
