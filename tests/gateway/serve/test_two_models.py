"""Two base models behind real gateways: real engine processes with fake executors, and a real Valkey."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from fakes import tiny_tokenizer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from engine.config import EngineConfig
from engine.demo import DEMO_ADAPTERS
from gateway.config.lanes import InteractiveLane, LanesConfig
from gateway.config.models import ModelConfig, ModelSettings
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
from gateway.serve.fleet import running_fleet
from gateway.serve.launch import Launch, StartError
from gateway.serve.single import running

KEY, ADMIN_KEY = "sk-acme-0123456789", "sk-admin-0123456789"
LARGE, SMALL = "org/large", "smollm2-135m-instruct"
"""The demo's adapters name the second as their base model."""
PIRATE = DEMO_ADAPTERS["pirate"]

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


def model_folder(root: Path, *, reverse: bool) -> str:
    """Write a folder that has a tokenizer and, in place of a model, what says that it is prepared."""
    tiny_tokenizer(reverse)._template.save_pretrained(root)
    (root / "config.json").write_text("{}")
    return str(root)


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Launch:
    def settings(name: str, reverse: bool, length: int, preload: dict[str, Path]) -> ModelSettings:
        source = model_folder(tmp_path_factory.mktemp("model"), reverse=reverse)
        engine = EngineConfig(model="", num_pages=2000, max_model_len=length)
        return ModelSettings(ModelConfig(source, name), engine, preload=preload)

    config = Config(
        models={LARGE: settings(LARGE, False, 1000, {}), SMALL: settings(SMALL, True, 500, {"pirate": PIRATE})},
        adapters=AdaptersConfig(roots=(PIRATE.parent,)),
        tenants={"acme": TenantConfig(Tenant("acme"), (hash_key(KEY),))},
        redis=RedisConfig(timeout_ms=30_000.0),
        http=HttpConfig(port=0, drain_seconds=0.5),
        grpc=GrpcConfig(port=0),
        admin=AdminConfig((hash_key(ADMIN_KEY),)),
        observability=ObservabilityConfig(request_log=False),
    )
    return Launch(config, None, tmp_path_factory.mktemp("data"), ("engine.serve.server", "--fake"))


@asynccontextmanager
async def alone(launch: Launch) -> AsyncIterator:
    async with running(launch) as app:
        said = io.StringIO()
        app.banner.print(Console(file=said, width=200))
        assert re.findall(r"base model +(\S+)", said.getvalue()) == [LARGE, SMALL]
        assert list(app.engines.supervisors) == [f"{LARGE}/engine-0", f"{SMALL}/engine-0"]
        yield app


@asynccontextmanager
async def together(launch: Launch) -> AsyncIterator:
    async with running_fleet(replace(launch, config=replace(launch.config, gateways=2))) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[alone, together], ids=["alone", "together"])
async def served(launch, request, tmp_path_factory):
    own = replace(launch, data_dir=tmp_path_factory.mktemp("data"))
    async with request.param(own) as found:
        yield found


def client(served, key: str = KEY) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.ports[0].http}", headers=headers, timeout=120)


async def sampled_by_model(served) -> dict[str, float]:
    """Return the number of tokens that each model's engine has sampled."""
    async with client(served, ADMIN_KEY) as http:
        text = (await http.get("/metrics")).text
    name = "loralane_generated_tokens"
    [family] = [family for family in text_string_to_metric_families(text) if family.name == name]
    return {sample.labels["model_name"]: sample.value for sample in family.samples}


@pytest.mark.parametrize(("model", "owner"), [(LARGE, LARGE), (SMALL, SMALL), ("pirate", SMALL)])
async def test_each_request_is_run_by_the_engine_of_its_model(served, model, owner):
    before = await sampled_by_model(served)
    body = {"model": model, "prompt": "hi", "max_tokens": 7, "ignore_eos": True}
    async with client(served) as http:
        answer = await http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 7), answer.text
    after = await sampled_by_model(served)
    assert {name: after[name] - before[name] for name in after} == {LARGE: 0, SMALL: 0, owner: 7}


async def test_callers_see_all_models_and_each_models_own_tokens(served):
    async with client(served) as http:
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"], card["max_model_len"]) for card in cards] == [
            (LARGE, None, 1000),
            (SMALL, None, 500),
            ("pirate", SMALL, 500),
        ]
        ids = [
            (await http.post("/tokenize", json={"model": name, "prompt": "hi"})).json()["tokens"]
            for name in (LARGE, SMALL)
        ]
        assert ids[0] != ids[1]
        ready = await http.get("/ready")
    assert (ready.status_code, ready.json()["models"]) == (200, {LARGE: None, SMALL: None})


async def test_an_adapter_goes_to_the_model_that_its_files_name(served):
    async with client(served, ADMIN_KEY) as http:
        loaded = await http.post("/admin/v1/adapters", json={"name": "cheer", "source": str(DEMO_ADAPTERS["cheer"])})
        assert (loaded.status_code, loaded.json()["base_model"]) == (200, SMALL), loaded.text
        taken = await http.post(
            "/admin/v1/adapters", json={"name": "pirate", "source": str(PIRATE), "base_model": LARGE}
        )
        assert taken.json()["error"]["code"] == "adapter_conflict"
        assert (await http.delete("/admin/v1/adapters/cheer")).status_code == 200


async def test_a_batch_may_name_both_models(served):
    def line(number: int, model: str) -> str:
        body = {"model": model, "prompt": "hi", "max_tokens": 3, "ignore_eos": True}
        return json.dumps({"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body})

    text = "\n".join(line(number, (LARGE, SMALL, "pirate")[number % 3]) for number in range(30))
    before = await sampled_by_model(served)
    async with client(served) as http:
        files = {"file": ("lines.jsonl", text.encode())}
        file = (await http.post("/v1/files", data={"purpose": "batch"}, files=files)).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
        batch = (await http.post("/v1/batches", json=body)).json()
        while batch["status"] not in ("completed", "failed"):
            batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 30)
    after = await sampled_by_model(served)
    assert {name: after[name] - before[name] for name in after} == {LARGE: 30, SMALL: 60}


async def test_a_reload_applies_the_lanes_of_each_model(served, launch):
    def faster(name: str, settings: ModelSettings) -> ModelSettings:
        lanes = LanesConfig(InteractiveLane(ttft_s=0.125)) if name == SMALL else settings.lanes
        return replace(settings, lanes=lanes)

    assert await served.apply(launch.config.with_served(faster)) == {}
    async with client(served, ADMIN_KEY) as http:
        text = (await http.get("/metrics")).text
        async with asyncio.timeout(30):  # lanes are cached for a second
            while (await interactive_lane(http, SMALL))["ttft_goal_seconds"] != 0.125:
                await asyncio.sleep(0.1)
    assert f'loralane_slo_goal_seconds{{goal="ttft",lane="interactive",model_name="{SMALL}"}} 0.125' in text
    assert f'loralane_slo_goal_seconds{{goal="ttft",lane="interactive",model_name="{LARGE}"}} 0.5' in text
    assert await served.apply(launch.config) == {}


async def interactive_lane(http, model):
    return (await http.get("/admin/v1/lanes", params={"model": model})).json()["lanes"][0]


async def test_a_preloaded_adapter_that_the_file_moves_to_another_model_is_there_after_the_next_start(launch, tmp_path):
    def preloading(owner: str) -> Launch:
        config = launch.config.with_served(
            lambda name, settings: replace(settings, preload={"pirate": PIRATE} if name == owner else {})
        )
        return replace(launch, config=config, data_dir=tmp_path / "data")

    for owner in (SMALL, LARGE):
        async with running(preloading(owner)) as served, client(served) as http:
            cards = (await http.get("/v1/models")).json()["data"]
            assert [card["parent"] for card in cards if card["id"] == "pirate"] == [owner]


async def test_nothing_listens_before_every_model_has_an_engine_that_serves(launch, tmp_path, monkeypatch):
    """A load balancer must not count a gateway that is still starting as ready."""
    waiting, go_on, wait_serving = asyncio.Event(), asyncio.Event(), EnginePool.wait_serving
    waited = []

    async def wait(engines: EnginePool, count: int) -> None:
        await wait_serving(engines, count)
        waited.append(engines)
        if len(waited) == 2:
            waiting.set()
            await go_on.wait()

    monkeypatch.setattr(EnginePool, "wait_serving", wait)
    port = free_port()
    config = replace(launch.config, http=replace(launch.config.http, port=port))

    async def serve() -> None:
        async with running(replace(launch, config=config, data_dir=tmp_path / "data")), httpx.AsyncClient() as http:
            answer = await http.get(f"http://127.0.0.1:{port}/ready")
            assert (answer.status_code, answer.json()["status"]) == (200, "ready")

    serving = asyncio.create_task(serve())
    async with asyncio.timeout(120):
        await waiting.wait()
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"http://127.0.0.1:{port}/ready")
    go_on.set()
    await serving


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_start_names_the_model_whose_template_cannot_be_used(launch, tmp_path):
    (tmp_path / "broken.jinja").write_text("{% if %}")
    settings = launch.config.models[SMALL]
    broken = replace(settings, model=replace(settings.model, chat_template=tmp_path / "broken.jinja"))
    config = replace(launch.config, models={LARGE: launch.config.models[LARGE], SMALL: broken})
    with pytest.raises(StartError, match=rf"models\.{SMALL}\.chat_template: "):
        async with running(replace(launch, config=config, data_dir=tmp_path / "data")):
            pass
