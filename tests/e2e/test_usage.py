"""The usage that is billed equals the usage that callers were told, for every tenant, model and lane."""

import asyncio
import csv
import json
import subprocess
import sys
from collections import Counter
from io import StringIO

import httpx
import pytest
from typer.testing import CliRunner

from gateway.cli.main import app
from gateway.core.tenants import hash_key, key_id

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
KEYS = {"acme": "sk-demo-acme", "globex": "sk-demo-globex"}
LANES = {"priority": "interactive", "flex": "batch"}
FIGURES = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
GROUPS = ("tenant", "key", "adapter", "lane")


async def settled(server):
    async with asyncio.timeout(120):
        while server.gateway.active:
            await asyncio.sleep(0.02)


async def counted(server):
    """(tenant, key, adapter, lane) -> figures, and all device seconds."""
    await settled(server)
    headers = {"authorization": "Bearer sk-demo-admin"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", headers=headers) as http:
        report = (await http.get("/admin/v1/usage", params={"group_by": ",".join(GROUPS)})).json()
    lines = {tuple(line[name] for name in GROUPS): line for line in report["usage"]}
    figures = Counter({(*group, name): line[name] for group, line in lines.items() for name in FIGURES})
    return figures, report["total"]["device_seconds"]


async def used(client, tenant, model, tier, stream):
    """Send one request, and return the group it is billed under and the usage that its answer reports."""
    options = {"model": model, "messages": QUESTION, "max_tokens": 6, "service_tier": tier, "n": 2}
    if stream:
        chunks = await client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
        usage = [chunk async for chunk in chunks][-1].usage
    else:
        usage = (await client.chat.completions.create(**options)).usage
    told = (1, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)
    group = (tenant, key_id(hash_key(KEYS[tenant])), model, LANES[tier])
    return Counter({(*group, name): number for name, number in zip(FIGURES, told, strict=True)})


async def test_usage_is_the_sum_of_what_answers_say(server, client_of, models):
    before, seconds_before = await counted(server)
    stats = await server.engine.stats()
    calls = [
        used(client_of(KEYS[tenant]), tenant, model, tier, stream)
        for tenant in KEYS
        for model in models
        for tier, stream in (("priority", True), ("flex", False))
    ]
    told = sum(await asyncio.gather(*calls), Counter())
    after, seconds = await counted(server)
    assert after - before == told
    busy = sum(lane.device_seconds for lane in (await server.engine.stats()).lanes)
    busy_before = sum(lane.device_seconds for lane in stats.lanes)
    assert seconds - seconds_before == pytest.approx(busy - busy_before, rel=1e-3)


async def test_a_caller_who_leaves_pays_for_what_was_made(server, models):
    before, _ = await counted(server)
    headers = {"authorization": "Bearer sk-demo-acme"}
    body = {"model": models[0], "messages": QUESTION, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", headers=headers) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data:") and "content" in line:
                break
    after, _ = await counted(server)
    by_figure = Counter()
    for (*_, name), number in (after - before).items():
        by_figure[name] += number
    assert by_figure["requests"] == 1
    assert 0 < by_figure["completion_tokens"] < 2000


async def test_a_csv_for_a_spreadsheet(server):
    arguments = ["usage", "--csv", "--by", "tenant,day", "--url", f"http://127.0.0.1:{server.http_port}"]
    command = [sys.executable, "-m", "gateway", *arguments]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=300, check=True)
    lines = list(csv.DictReader(StringIO(done.stdout)))
    assert {line["tenant"] for line in lines} <= {*KEYS, "limited"}  # the last is made by the test of attacks
    assert all(int(line["prompt_tokens"]) > 0 for line in lines)


async def test_traffic_is_analysed_as_it_was_counted(server, tmp_path):
    await settled(server)
    figures, target = tmp_path / "figures.json", f"http://127.0.0.1:{server.http_port}"
    command = ["analyze", "--live", "--device", "cpu-smollm2", "--json", str(figures), "--url", target]
    done = await asyncio.to_thread(CliRunner().invoke, app, [*command, "--key", "sk-demo-admin"])
    assert done.exit_code == 0, done.output
    counted_now, _ = await counted(server)
    traffic = json.loads(figures.read_text())["usage"]["traffic"]
    requests = [number for (*_, name), number in counted_now.items() if name == "requests"]
    assert traffic["requests"] == sum(requests)
    assert set(traffic["tenants"]) >= set(KEYS)
    assert 0 < traffic["adapters"]["share"] < 1
