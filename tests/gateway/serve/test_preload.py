"""Adapters that the configuration names: what is broken is listed and does not stop the start."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes import BASE, build_gateway_app, write_adapter

from gateway.config.models import ModelConfig
from gateway.config.sections import AdaptersConfig
from gateway.config.whole import Config
from gateway.serve.launch import StartError
from gateway.serve.models import preload


@pytest.fixture
def bar():
    stages = []
    return SimpleNamespace(stages=stages, report=lambda stage, text, part: stages.append(text))


def configured(**preload) -> Config:
    return replace(Config(), model=ModelConfig(name=BASE), adapters=AdaptersConfig(preload=preload))


async def test_a_gateway_starts_without_its_broken_adapters_and_lists_them(tmp_path, bar):
    gateway_app = await build_gateway_app(tmp_path)
    sound, gone = write_adapter(tmp_path, "sound"), tmp_path / "gone"
    await preload(gateway_app.gateway.models, configured(sound=sound, gone=gone), bar)
    assert bar.stages[-1] == "loading adapters: 2 of 2"
    async with gateway_app.client("sk-admin") as client, gateway_app.client() as tenant:
        listed = {entry["name"]: entry for entry in (await client.get("/admin/v1/adapters")).json()["adapters"]}
        assert listed["sound"]["error"] == "" and listed["sound"]["served_version"]
        assert str(gone) in listed["gone"]["error"] and not listed["gone"]["served_version"]
        assert listed["gone"]["source"] == str(gone)
        asked = await tenant.post("/v1/completions", json={"model": "gone", "prompt": "hi"})
        assert (asked.status_code, asked.json()["error"]["code"]) == (503, "engine_unavailable")
        write_adapter(tmp_path, "gone")
        assert (await client.post("/admin/v1/adapters/gone/reload")).json()["adapter"]["error"] == ""
    await gateway_app.adapters.close()


async def test_a_name_that_is_taken_stops_the_start(tmp_path, bar):
    gateway_app = await build_gateway_app(tmp_path)
    with pytest.raises(StartError, match="adapter captain: "):
        await preload(gateway_app.gateway.models, configured(captain=tmp_path / "poet"), bar)
