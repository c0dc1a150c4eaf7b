import asyncio
from unittest.mock import AsyncMock

import pytest
from fakes import BASE, House, build_house, ids_of, write_adapter

from gateway.core.errors import ApiError


@pytest.fixture
async def house(tmp_path) -> House:
    return await build_house(tmp_path)


async def test_load_and_unload_over_http(house, tmp_path):
    write_adapter(tmp_path, "bard")
    async with house.client("sk-admin") as client:
        loaded = await client.post("/v1/load_lora_adapter", json={"lora_name": "bard", "lora_path": "bard"})
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'bard' added successfully.")
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == [BASE, "bard", "pirate", "poet"]
        unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": "bard"})
        assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'bard' removed successfully.")
        assert (await client.get("/v1/models/bard")).status_code == 404
    assert len(house.engine.unloaded) == 1


async def test_replacing_serves_the_new_version_and_frees_the_old(house, tmp_path):
    old = house.adapters.records["poet"].version
    write_adapter(tmp_path, "poet", "better weights")
    async with house.client("sk-admin") as client:
        body = {"lora_name": "poet", "lora_path": str(tmp_path / "poet"), "load_inplace": True}
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
    await house.adapters.close()
    assert house.adapters.records["poet"].version != old
    assert house.engine.unloaded == [old]


async def test_one_version_under_two_names_is_freed_with_the_last(house):
    await house.adapters.load("twin", "poet")
    assert await house.adapters.unload("poet") == 0
    assert house.engine.unloaded == []
    assert await house.adapters.unload("twin") == 2
    assert len(house.engine.unloaded) == 1


async def test_two_changes_of_one_name_at_once_conflict(house, tmp_path):
    write_adapter(tmp_path, "bard")
    results = await asyncio.gather(
        house.adapters.load("bard", "bard"), house.adapters.load("bard", "bard"), return_exceptions=True
    )
    assert sorted(isinstance(result, ApiError) and result.code == "adapter_conflict" for result in results) == [
        False,
        True,
    ]
    assert house.adapters.records["bard"].loaded


async def test_statuses_tell_the_tier(house):
    [pirate, poet] = await house.adapters.statuses()
    assert (pirate.record.name, pirate.tier, pirate.running, poet.record.rank) == ("pirate", "resident", 1, 8)
    house.engine.ready = False
    assert {status.tier for status in await house.adapters.statuses()} == {"disk"}


async def test_a_restarted_engine_gets_its_adapters_back(house, tmp_path):
    house.engine.paths.clear()
    write_adapter(tmp_path, "poet", "changed on disk")
    await house.adapters.reload_all()
    assert set(house.engine.paths) == {record.version for record in house.adapters.records.values()}


async def test_reloading_goes_on_after_an_adapter_that_is_lost(house):
    house.engine.rejected = "no such file"
    await house.adapters.reload_all()
    assert [record.loaded for record in house.adapters.records.values()] == [False, False]
    house.engine.rejected = ""
    await house.adapters.reload_all()
    assert [record.loaded for record in house.adapters.records.values()] == [True, True]


async def test_reloading_does_not_bring_back_what_was_unloaded_meanwhile(house, monkeypatch):
    load_adapter = house.engine.load_adapter

    async def load_while_an_operator_unloads(path):
        info = await load_adapter(path)
        if path.endswith("poet"):
            await house.adapters.unload("poet")
        return info

    monkeypatch.setattr(house.engine, "load_adapter", load_while_an_operator_unloads)
    poet = house.adapters.records["poet"].version
    house.engine.unload_adapter = AsyncMock(return_value=0)
    await house.adapters.reload_all()
    assert list(house.adapters.records) == ["pirate"]
    assert house.engine.unload_adapter.await_args.args[0] == poet


async def test_a_version_named_again_while_the_engine_lets_it_go_is_loaded_again(house, monkeypatch):
    unload_adapter = house.engine.unload_adapter

    async def unload_while_an_operator_loads(version, drain_seconds):
        await house.adapters.load("twin", "poet")
        return await unload_adapter(version, drain_seconds)

    monkeypatch.setattr(house.engine, "unload_adapter", unload_while_an_operator_loads)
    await house.adapters.unload("poet")
    assert house.adapters.records["twin"].version in house.engine.paths


async def test_unloading_needs_no_engine(house):
    house.engine.ready = False
    await house.adapters.reload_all()
    assert await house.adapters.unload("poet") == 0
    with pytest.raises(ApiError, match="not available"):
        await house.adapters.load("poet", "poet")


async def test_the_integrity_check_is_an_administrators(house):
    async with house.client("sk-admin") as client:
        assert (await client.get("/admin/v1/check")).json() == {"violations": ["page 7 is lost"]}
        house.engine.ready = False
        gone = await client.get("/admin/v1/check")
    assert (gone.status_code, gone.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_tokenize_and_detokenize(house):
    async with house.client() as client:
        text = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        assert text == {
            "count": 3,
            "max_model_len": 256,
            "tokens": list(ids_of("hé")),
            "token_strs": ["h", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}"],
        }
        chat = {"model": "poet", "messages": [{"role": "user", "content": "hi"}]}
        tokens = (await client.post("/tokenize", json=chat)).json()["tokens"]
        back = (await client.post("/detokenize", json={"model": BASE, "tokens": tokens})).json()
        assert back == {"prompt": "<|user|>hi<|end|><|assistant|>"}


async def test_health_and_readiness_are_two_things(house):
    async with house.client(None) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        ready = await client.get("/ready")
        assert ready.status_code == 200
        assert ready.json() == {"status": "ready", "engine": True, "redis": True, "limiter": "degraded"}
        house.engine.ready, house.limiter.reachable = False, False
        unready = await client.get("/ready")
        assert (unready.status_code, unready.json()["engine"], unready.json()["redis"]) == (503, False, False)
        house.engine.ready, house.limiter.mode = True, "closed"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/version")).json()["version"]
