import asyncio

import pytest
from fakes import BASE, GatewayApp, build_gateway_app, ids_of, write_adapter

from engine.pb import engine_pb2 as pb
from gateway.http.routes.status import REDIS_PING_SECONDS


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


async def test_load_and_unload_over_http(gateway_app, tmp_path):
    write_adapter(tmp_path, "bard")
    async with gateway_app.client("sk-admin") as client, gateway_app.client("sk-acme") as tenant:
        loaded = await client.post("/v1/load_lora_adapter", json={"lora_name": "bard", "lora_path": "bard"})
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'bard' added successfully.")
        listed = (await tenant.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == [BASE, "bard", "pirate", "poet", "captain"]
        unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": "bard"})
        assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'bard' removed successfully.")
        assert (await tenant.get("/v1/models/bard")).status_code == 404
    assert len(gateway_app.engine.unloaded) == 1


async def test_load_inplace_serves_the_new_version_and_frees_the_old(gateway_app, tmp_path):
    old = gateway_app.adapters.records["poet"].version
    write_adapter(tmp_path, "poet", "better weights")
    async with gateway_app.client("sk-admin") as client:
        body = {"lora_name": "poet", "lora_path": str(tmp_path / "poet"), "load_inplace": True}
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
    await gateway_app.adapters.wait_until_released()
    assert gateway_app.adapters.pick("poet").version != old
    assert gateway_app.engine.unloaded == [old]


async def test_an_alias_is_a_model_whose_root_is_its_target(gateway_app):
    async with gateway_app.client() as client:
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        assert (await client.get("/v1/models/captain")).json() == cards["captain"]
        chat = {"model": "captain", "messages": [{"role": "user", "content": "hi"}]}
        assert (await client.post("/v1/chat/completions", json=chat)).json()["model"] == "captain"
    assert [(cards[name]["root"], cards[name]["parent"]) for name in ("captain", "pirate", BASE)] == [
        ("pirate", BASE),
        (BASE, BASE),
        (BASE, None),
    ]
    assert gateway_app.engine.requests[0].adapter_hash == gateway_app.adapters.records["pirate"].version


async def test_what_operators_see(gateway_app):
    version = gateway_app.adapters.records["pirate"].version
    pirate = {
        "adapter": version,
        "state": "host",
        "running": 2,
        "waiting": 3,
        "hits": 7,
        "loads": 5,
        "fetches": 1,
        "last_load_seconds": 0.25,
        "last_fetch_seconds": 0.5,
        "idle_seconds": 1.5,
    }
    gateway_app.engine.picture = pb.EngineStats(adapters=[pb.AdapterStats(**pirate)])
    async with gateway_app.client("sk-admin") as client:
        listed = (await client.get("/admin/v1/adapters")).json()["adapters"]
        shown = (await client.get("/admin/v1/adapters/pirate")).json()
        assert (await client.get("/admin/v1/adapters/unknown")).status_code == 404
    assert [adapter["name"] for adapter in listed] == ["pirate", "poet"]
    assert listed[0] == shown
    engine = {name: value for name, value in pirate.items() if name not in ("adapter", "state")}
    assert {name: shown[name] for name in engine} == engine
    assert (shown["tier"], shown["version"], shown["served_version"]) == ("host", version, version)
    assert (shown["aliases"], shown["rank"], shown["pages"], shown["bytes"]) == (["captain"], 8, 3, 1000)
    assert (listed[1]["tier"], listed[1]["idle_seconds"], listed[1]["error"]) == ("disk", None, "")


async def test_everything_an_operator_can_do(gateway_app, tmp_path):
    write_adapter(tmp_path, "bard")
    adapters = "/admin/v1/adapters"
    async with gateway_app.client("sk-admin") as client:
        body = {"name": "team/bard", "source": "bard", "tenants": ["globex", "acme"]}
        loaded = (await client.post(adapters, json=body)).json()
        assert (loaded["name"], loaded["tenants"], loaded["tier"]) == ("team/bard", ["acme", "globex"], "resident")
        taken = (await client.post(adapters, json=body)).json()["error"]
        assert (taken["code"], taken["param"]) == ("adapter_conflict", "name")
        outside = await client.post(adapters, json={"name": "x", "source": "/etc"})
        assert (outside.status_code, outside.json()["error"]["param"]) == (400, "source")
        bard = f"{adapters}/team/bard"
        assert (await client.post(f"{bard}/reload")).json()["changed"] is False
        write_adapter(tmp_path, "bard", "other weights")
        reloaded = (await client.post(f"{bard}/reload")).json()
        assert reloaded["changed"]
        assert reloaded["adapter"]["version"] != loaded["version"]
        assert (await client.post(f"{bard}/aliases", json={"alias": "b"})).json()["aliases"] == ["b"]
        assert (await client.post(f"{bard}/aliases", json={"alias": "captain"})).status_code == 409
        assert (await client.post(f"{bard}/aliases", json={"alias": "c"})).status_code == 200
        assert (await client.post(f"{bard}/aliases", json={"alias": "b", "remove": True})).json()["aliases"] == ["c"]
        assert (await client.post(f"{bard}/pin")).json()["pinned"]
        assert gateway_app.engine.pinned == {reloaded["adapter"]["version"]}
        assert not (await client.post(f"{bard}/unpin")).json()["pinned"]
        assert (await client.post(f"{bard}/tenants", json={"tenants": []})).json()["tenants"] == []
        assert (await client.delete(bard, params={"drain_seconds": 0})).json() == {"aborted": 2}
        assert (await client.get(bard)).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("POST", ""),
        ("GET", "/pirate"),
        ("DELETE", "/pirate"),
        *[("POST", f"/pirate/{verb}") for verb in ("reload", "pin", "unpin", "aliases", "tenants")],
    ],
)
async def test_administration_is_for_administrators(gateway_app, method, path):
    async with gateway_app.client() as client:
        response = await client.request(method, f"/admin/v1/adapters{path}", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
    assert list(gateway_app.adapters.records) == ["pirate", "poet"]


@pytest.mark.parametrize("seconds", ["-1", "nan", "soon", "1e9"])
async def test_drain_seconds_are_checked(gateway_app, seconds):
    async with gateway_app.client("sk-admin") as client:
        response = await client.delete("/admin/v1/adapters/pirate", params={"drain_seconds": seconds})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "drain_seconds")
    assert "pirate" in gateway_app.adapters.records


async def test_an_adapter_kept_for_another_tenant_is_not_there(gateway_app):
    await gateway_app.adapters.allow("pirate", ["globex"])
    async with gateway_app.client("sk-acme") as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == [BASE, "poet"]
        chat = {"model": "captain", "messages": [{"role": "user", "content": "hi"}]}
        refused = await client.post("/v1/chat/completions", json=chat)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    async with gateway_app.client("sk-globex") as client:
        assert (await client.get("/v1/models/captain")).status_code == 200


async def test_the_integrity_check_is_an_administrators(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        assert (await client.get("/admin/v1/check")).json() == {"violations": ["page 7 is lost"]}
        gateway_app.engine.ready = False
        gone = await client.get("/admin/v1/check")
    assert (gone.status_code, gone.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_tokenize_and_detokenize(gateway_app):
    async with gateway_app.client() as client:
        text = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        assert text == {
            "count": 3,
            "max_model_len": 256,
            "tokens": list(ids_of("hé")),
            "token_strs": ["h", "\xc3", "\xa9"],
        }
        chat = {"model": "poet", "messages": [{"role": "user", "content": "hi"}]}
        tokens = (await client.post("/tokenize", json=chat)).json()["tokens"]
        back = (await client.post("/detokenize", json={"model": BASE, "tokens": tokens})).json()
        assert back == {"prompt": "<|user|>hi<|end|><|assistant|>"}


async def test_health_and_readiness_are_two_things(gateway_app):
    async with gateway_app.client(None) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        ready = await client.get("/ready")
        assert ready.status_code == 200
        limiter = {"models": {BASE: None}, "limiter": "degraded", "limiter_modes": ["degraded"]}
        assert ready.json() == {"status": "ready", "reason": None, "engine": True, "redis": True, **limiter}
        gateway_app.engine.ready, gateway_app.limiter.reachable = False, False
        await asyncio.sleep(REDIS_PING_SECONDS)
        unready = await client.get("/ready")
        assert (unready.status_code, unready.json()["engine"], unready.json()["redis"]) == (503, False, False)
        assert unready.json()["reason"].endswith("Redis: it gives no answer")
        gateway_app.engine.ready, gateway_app.limiter.modes = True, frozenset(("closed",))
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/version")).json()["version"]
