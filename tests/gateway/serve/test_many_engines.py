"""Several engines of several base models, as real processes with fake executors: streams outlive the end of an engine
and the draining of another, whole and charged exactly."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fakes import tiny_tokenizer

from engine.config import EngineConfig
from engine.demo import DEMO_ADAPTERS
from engine.rpc.target import EngineTls
from gateway.api_schema.engines import EngineOverview
from gateway.config.models import EnginesConfig, ModelConfig, ModelSettings
from gateway.config.sections import (
    AdaptersConfig,
    AdminConfig,
    GrpcConfig,
    HttpConfig,
    ObservabilityConfig,
    RedisConfig,
    TenantConfig,
)
from gateway.config.whole import Config
from gateway.core.tenants import Tenant, hash_key
from gateway.engines.pool import EnginePool
from gateway.serve.engine_group import divided, visible_gpus
from gateway.serve.launch import Launch, StartError
from gateway.serve.lone_engine import engine_listening
from gateway.serve.single import running
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import Stop
from tests.gateway.certificates import Authority

KEY, ADMIN_KEY = "sk-acme-0123456789", "sk-admin-0123456789"
MODELS = ("one", "two")
ADAPTERS = 25
"""Adapters of each model."""
STREAMS = 80
TOKENS = 120


def model_settings(folder: Path, name: str) -> ModelSettings:
    source = folder / name
    tiny_tokenizer(reverse=name == MODELS[1])._template.save_pretrained(source)
    (source / "config.json").write_text("{}")
    adapters = {f"{name}-{number}": folder / f"{name}-{number}" for number in range(ADAPTERS)}
    for path in adapters.values():
        shutil.copytree(DEMO_ADAPTERS["pirate"], path)
    engine = EngineConfig(model="", num_pages=4000, max_model_len=1000)
    return ModelSettings(ModelConfig(str(source), name), engine, EnginesConfig(replicas=2), preload=adapters)


@pytest.fixture
def launch(tmp_path) -> Launch:
    config = Config(
        models={name: model_settings(tmp_path, name) for name in MODELS},
        adapters=AdaptersConfig(roots=(tmp_path,)),
        tenants={"acme": TenantConfig(Tenant("acme"), (hash_key(KEY),))},
        redis=RedisConfig(timeout_ms=30_000.0),
        http=HttpConfig(port=0),
        grpc=GrpcConfig(port=0),
        admin=AdminConfig((hash_key(ADMIN_KEY),)),
        observability=ObservabilityConfig(request_log=False),
    )
    return Launch(config, None, tmp_path / "data", ("engine.serve.server", "--fake"))


def body(number: int) -> dict:
    model = f"{MODELS[number % 2]}-{number // 2 % ADAPTERS}"
    asked = {
        "model": model,
        "prompt": f"request {number % 7}",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": number,
    }
    return {**asked, "stream": True, "stream_options": {"include_usage": True}}


async def read(http: httpx.AsyncClient, number: int) -> tuple[str, int]:
    """Return the text of a stream, and the completion tokens that its last chunk reports."""
    text, usage = "", None
    async with http.stream("POST", "/v1/completions", json=body(number)) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                text += "".join(choice["text"] for choice in chunk["choices"])
                usage = chunk.get("usage") or usage
    return text, usage["completion_tokens"]


@pytest.mark.slow
async def test_streams_outlive_an_engine_that_is_killed_and_one_that_is_drained(launch):
    async with running(launch) as app:
        headers = {"authorization": f"Bearer {KEY}"}
        url = f"http://127.0.0.1:{app.http_port}"
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=240, limits=limits) as http:
            expected = {}
            for number in range(0, STREAMS, 10):  # undisturbed
                expected[number] = await read(http, number)
            streams = [asyncio.create_task(read(http, number)) for number in range(STREAMS)]
            await until(lambda: sum(record.completion_tokens for record in app.gateway.live.values()) > STREAMS)
            os.kill(app.engines.supervisors["one/engine-0"].pid, signal.SIGKILL)
            two = next(model for model in app.gateway.models if model.name == "two")
            await two.engine.drain("engine-1", True)
            await until(lambda: any(record.moves for record in app.gateway.live.values()))
            answers = await asyncio.gather(*streams)
            rolling = [asyncio.create_task(read(http, number)) for number in range(1, STREAMS, 4)]
            for name in ("engine-1", "engine-0"):
                await restart(two.engine, name)
            assert {text for text, _ in await asyncio.gather(*rolling)} <= {text for text, _ in answers}
        assert [tokens for _, tokens in answers] == [TOKENS] * STREAMS
        assert {number: answers[number] for number in expected} == expected
        assert not app.gateway.live


@pytest.mark.slow
async def test_a_gateway_uses_engines_that_run_elsewhere(launch, tmp_path):
    authority = Authority.at(tmp_path / "ca")

    def files(name: str) -> EngineTls:
        issued = authority.issue(name)
        return EngineTls(authority.file, issued.cert, issued.key)

    settings, addresses = launch.config.models["one"], []
    async with AsyncExitStack() as stack:
        for number in range(2):
            place, own = tmp_path / f"machine-{number}", EnginesConfig(tls=files(f"engine-{number}"))
            lone = replace(settings, engines=own)
            listening = engine_listening(lone, "127.0.0.1:0", place, Stop(), StartBar.hidden(), launch.engine)
            addresses.append((await stack.enter_async_context(listening)).address)
        remote = replace(settings, engines=EnginesConfig(addresses=(addresses[0],), tls=files("gateway")))
        own = replace(launch, config=replace(launch.config, models={"one": remote}))
        app = await stack.enter_async_context(running(own))
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {ADMIN_KEY}"}) as http:
            body = {"name": "second", "address": addresses[1]}
            added = await http.post(f"http://127.0.0.1:{app.http_port}/admin/v1/engines", json=body)
            assert (added.status_code, added.json()["state"]) == (201, "connecting")
        await app.engine.wait_serving(2)
        assert not app.engines.supervisors
        assert [overview.address for overview in app.engine.overviews()] == addresses
        headers, url = {"authorization": f"Bearer {KEY}"}, f"http://127.0.0.1:{app.http_port}"
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=240) as http:
            answers = await asyncio.gather(*(read(http, number) for number in range(0, 40, 2)))
        assert [tokens for _, tokens in answers] == [TOKENS] * 20


async def restart(pool: EnginePool, name: str) -> None:
    """Restart an engine, and return when its next process serves."""

    def seen() -> EngineOverview:
        return next(overview for overview in pool.overviews() if overview.name == name)

    life = seen().life
    await pool.drain(name, True, restart=True, seconds=60)
    await until(lambda: seen().life != life and seen().state == "serving")


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_engines_on_one_cpu_share_its_cores_and_memory(monkeypatch):
    monkeypatch.setattr("gateway.serve.engine_group.usable_cores", lambda: 8)
    parts = [config for config, _ in divided(EngineConfig(model="m", device="cpu", state_dir="/state"), 3)]
    assert [(part.threads, part.machine_share, part.state_dir) for part in parts] == [
        (2, 1 / 3, "/state"),
        (2, 1 / 3, "/state-1"),
        (2, 1 / 3, "/state-2"),
    ]
    assert [config.threads for config, _ in divided(EngineConfig(model="m", device="cpu", threads=5), 2)] == [5, 5]


def test_engines_on_gpus_get_one_each(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert visible_gpus(os.environ) == ("4", "6")
    assert [env for _, env in divided(EngineConfig(model="m"), 2)] == [
        {"CUDA_VISIBLE_DEVICES": "4"},
        {"CUDA_VISIBLE_DEVICES": "6"},
    ]
    with pytest.raises(StartError, match="there are 2 GPUs"):
        list(divided(EngineConfig(model="m"), 3))
