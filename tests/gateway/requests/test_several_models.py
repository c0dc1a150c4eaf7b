"""A gateway with two base models, each with its engine and tokenizer: a request's model decides which one it gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import ACME, BASE, FakeEngine, GatewayApp, build_gateway_app, tiny_tokenizer, write_adapter
from grpc_app import as_key, ask, open_grpc_app, refused
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest
from prometheus_client.parser import text_string_to_metric_families

from engine.core.messages.requests import Lane
from gateway.adapters.names import AdapterNames
from gateway.core.errors import ApiError, Fault
from gateway.pb import adapters_pb2 as adapters
from gateway.pb import operations_pb2 as operations
from gateway.pb.generation_pb2 import ListModelsRequest, TokenizeRequest
from gateway.pb.operations_pb2_grpc import LaneAdminStub, RequestAdminStub
from gateway.requests.settings import ServiceSettings

SMALL, SMALL_CONTEXT = "small", 128
HELLO = "Hello from the small one."
ADAPTERS = "/admin/v1/adapters"


def model_of(gateway_app, name):
    return next(model for model in gateway_app.gateway.models if name in model.names)


def small_engine() -> FakeEngine:
    engine = FakeEngine(tiny_tokenizer(reverse=True))
    engine.info.max_model_len, engine.info.model_hash = SMALL_CONTEXT, "small"
    engine.reply = lambda request: HELLO
    return engine


@pytest.fixture
async def gateway_app(tmp_path: Path) -> GatewayApp:
    """A gateway of `tiny` and `small`, which has the adapter `sailor` with the alias `mate`."""
    gateway_app = await build_gateway_app(tmp_path, others={SMALL: small_engine()})
    await add_sailor(gateway_app, tmp_path)
    return gateway_app


async def add_sailor(gateway_app: GatewayApp, root: Path) -> None:
    registry = model_of(gateway_app, SMALL).adapters
    await registry.load("sailor", str(write_adapter(root, "sailor")))
    await registry.alias("sailor", "mate")


def engine_of(gateway_app: GatewayApp, name: str = SMALL) -> FakeEngine:
    return model_of(gateway_app, name).engine


def made_for(root: Path, name: str, base: str) -> Path:
    folder = write_adapter(root, name)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    return folder


async def chat(gateway_app: GatewayApp, model: str, **fields):
    async with gateway_app.client() as client:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("name", [SMALL, "sailor", "mate", f"{SMALL}:mate"])
async def test_a_requests_model_decides_engine_tokenizer_and_adapter(gateway_app, name):
    answer = await chat(gateway_app, name)
    assert answer.json()["choices"][0]["message"]["content"] == HELLO
    [request] = engine_of(gateway_app).requests
    assert gateway_app.engine.requests == []
    read = model_of(gateway_app, SMALL).tokenizer.decode
    assert read(request.prompt_ids, skip_special=False) == "<|user|>hi<|end|><|assistant|>"
    record = gateway_app.watcher.records[0]
    assert (record.served.base_model, record.served.name) == (SMALL, SMALL if name == SMALL else "sailor")
    other = await chat(gateway_app, "pirate")
    assert other.json()["choices"][0]["message"]["content"] == "Hello, world!"
    assert other.json()["system_fingerprint"][:13] != answer.json()["system_fingerprint"][:13]


async def test_the_list_of_models_has_all_base_models_with_their_adapters(gateway_app):
    async with gateway_app.client() as client:
        cards = (await client.get("/v1/models")).json()["data"]
        one = (await client.get("/v1/models/mate")).json()
    listed = [(card["id"], card["root"], card["parent"]) for card in cards]
    assert listed == [
        (BASE, BASE, None),
        ("pirate", BASE, BASE),
        ("poet", BASE, BASE),
        ("captain", "pirate", BASE),
        (SMALL, SMALL, None),
        ("sailor", SMALL, SMALL),
        ("mate", "sailor", SMALL),
    ]
    assert (one["parent"], one["max_model_len"]) == (SMALL, SMALL_CONTEXT)


async def test_tokens_are_those_of_the_named_model(gateway_app):
    async with gateway_app.client() as client:
        answers = [
            (await client.post("/tokenize", json={"model": name, "prompt": "hi"})).json() for name in (BASE, "sailor")
        ]
        assert [answer["max_model_len"] for answer in answers] == [256, SMALL_CONTEXT]
        assert answers[0]["tokens"] != answers[1]["tokens"]
        body = {"model": "mate", "tokens": answers[1]["tokens"]}
        assert (await client.post("/detokenize", json=body)).json() == {"prompt": "hi"}
        long = await client.post("/v1/completions", json={"model": SMALL, "prompt": "x" * 200})
    assert long.json()["error"]["code"] == "context_length_exceeded"


async def test_tokens_of_no_named_model_are_refused(gateway_app):
    async with gateway_app.client() as client:
        for path, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [5]})):
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
            assert f"one of {BASE}, {SMALL}" in answer.json()["error"]["message"]


AWAY = "the engine is not connected"


async def test_a_gateway_whose_one_model_is_away_is_degraded_and_serves_the_other(gateway_app):
    engine_of(gateway_app).ready = False
    async with gateway_app.client(None) as client:
        answer = await client.get("/ready")
        named = [await client.get("/ready", params={"model": name}) for name in (BASE, SMALL)]
    found = answer.json()
    assert (answer.status_code, found["status"], found["reason"]) == (200, "degraded", f"{SMALL}: {AWAY}")
    assert (found["models"], found["engine"]) == ({BASE: None, SMALL: AWAY}, False)
    assert [(one.status_code, one.json()["status"]) for one in named] == [(200, "ready"), (503, "not_ready")]
    assert (named[1].json()["reason"], named[1].json()["models"]) == (AWAY, {SMALL: AWAY})
    assert (await chat(gateway_app, "pirate")).status_code == 200
    assert (await chat(gateway_app, SMALL)).json()["error"]["code"] == "engine_unavailable"


async def test_a_gateway_that_can_serve_no_model_is_not_ready(gateway_app):
    gateway_app.engine.ready = engine_of(gateway_app).ready = False
    async with gateway_app.client(None) as client:
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["status"]) == (503, "not_ready")
        assert answer.json()["reason"] == f"{BASE}: {AWAY}; {SMALL}: {AWAY}"
        gateway_app.engine.ready = engine_of(gateway_app).ready = True
        gateway_app.limiter.modes = frozenset(("closed",))
        answer = await client.get("/ready", params={"model": SMALL})
        assert (answer.status_code, answer.json()["reason"]) == (503, "limits cannot be checked while Redis is away")


async def test_ready_refuses_a_model_that_does_not_exist_and_a_parameter_that_it_does_not_know(gateway_app):
    async with gateway_app.client(None) as client:
        for name in ("other", "pirate"):
            unknown = await client.get("/ready", params={"model": name})
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
            assert f"there are {BASE}, {SMALL}" in unknown.json()["error"]["message"]
        assert (await client.get("/ready", params={"modle": SMALL})).status_code == 400


async def test_lanes_are_full_by_model(tmp_path):
    capacity = ServiceSettings(lane_capacity={Lane.INTERACTIVE: 1})
    gateway_app = await build_gateway_app(tmp_path, capacity, others={SMALL: small_engine()})
    model = model_of(gateway_app, SMALL)
    with model.answering(Lane.INTERACTIVE, ACME, 1):
        assert (await chat(gateway_app, SMALL)).json()["error"]["code"] == "lane_queue_full"
        assert (await chat(gateway_app, BASE)).status_code == 200
    assert (await chat(gateway_app, SMALL)).status_code == 200


async def test_an_adapter_goes_to_the_model_that_is_named_or_that_its_configuration_names(gateway_app, tmp_path):
    async with gateway_app.client("sk-admin") as client:

        async def load(name: str, base: str, **fields: str):
            source = str(made_for(tmp_path, name, base))
            return await client.post(ADAPTERS, json={"name": name, "source": source, **fields})

        assert (await load("a", "unknown", base_model=SMALL)).json()["base_model"] == SMALL
        assert (await load("b", SMALL)).json()["base_model"] == SMALL
        assert (await load("c", f"acme/{SMALL}")).json()["base_model"] == SMALL
        assert (await load("d", "/elsewhere/Tiny")).json()["base_model"] == BASE
        wrong = await load("e", "acme/other")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "base_model")
        assert f"one of {BASE}, {SMALL}" in wrong.json()["error"]["message"]
        missing = await client.post(ADAPTERS, json={"name": "f", "source": str(write_adapter(tmp_path, "f"))})
        assert "cannot be read" in missing.json()["error"]["message"]
        nowhere = await load("g", SMALL, base_model="other")
        assert f"there are {BASE}, {SMALL}" in nowhere.json()["error"]["message"]
        listed = (await client.get(ADAPTERS)).json()["adapters"]
        assert {one["name"]: one["base_model"] for one in listed} == {
            **dict.fromkeys("abc", SMALL),
            **dict.fromkeys(("d", "pirate", "poet"), BASE),
            "sailor": SMALL,
        }
        assert (await client.post(f"{ADAPTERS}/sailor/pin")).json()["pinned"]
        assert engine_of(gateway_app).pinned and not gateway_app.engine.pinned
        assert (await client.delete(f"{ADAPTERS}/sailor")).status_code == 200
    assert (await chat(gateway_app, "sailor")).status_code == 404


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("pirate", Fault.ADAPTER_CONFLICT),
        ("captain", Fault.ADAPTER_CONFLICT),
        (BASE, Fault.INVALID_REQUEST),
        (SMALL, Fault.INVALID_REQUEST),
    ],
)
async def test_a_name_that_another_model_has_is_refused(gateway_app, tmp_path, name, fault):
    registry = model_of(gateway_app, SMALL).adapters
    source = str(write_adapter(tmp_path, "another"))
    for change in (registry.load(name, source), registry.alias("sailor", name), registry.seed(name, source)):
        with pytest.raises(ApiError) as caught:
            await change
        assert caught.value.fault is fault


async def test_of_equal_names_the_first_models_is_served_and_the_other_is_listed_with_an_error(gateway_app, tmp_path):
    """A gateway that starts without Redis cannot see that another model has the name."""
    later = model_of(gateway_app, SMALL).adapters
    later.share_names(AdapterNames([later]))
    await later.load("pirate", str(write_adapter(tmp_path, "pirate", "small weights")))
    assert (await chat(gateway_app, "pirate")).json()["choices"][0]["message"]["content"] == "Hello, world!"
    assert (await chat(gateway_app, f"{SMALL}:pirate")).status_code == 404
    async with gateway_app.client("sk-admin") as client:
        listed = (await client.get(ADAPTERS)).json()["adapters"]
        errors = {one["base_model"]: one["error"] for one in listed if one["name"] == "pirate"}
        assert errors == {BASE: "", SMALL: f"not served: {BASE} has it too; unload one of the two"}
        cards = (await client.get(ADAPTERS + "/pirate")).json()
        assert cards["base_model"] == BASE
        assert (await client.delete(ADAPTERS + "/pirate", params={"base_model": SMALL})).status_code == 200
    assert "pirate" not in later.records and "pirate" in gateway_app.adapters.records


async def test_metrics_of_engines_and_latencies_name_the_model(gateway_app):
    for name in ("sailor", BASE, "unknown"):
        await chat(gateway_app, name)
    engine_of(gateway_app).picture = await engine_of(gateway_app).stats()
    engine_of(gateway_app).picture.free_pages = 7
    async with gateway_app.client("sk-admin") as client:
        text = (await client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert len({(one.name, frozenset(one.labels.items())) for one in samples}) == len(samples)

    def by_model(name: str, **labels: str) -> dict[str, float]:
        return {
            one.labels["model_name"]: one.value
            for one in samples
            if one.name == name and labels.items() <= one.labels.items()
        }

    assert by_model("loralane_free_pages") == {BASE: 50, SMALL: 7}
    assert by_model("loralane_engine_up") == {BASE: 1, SMALL: 1}
    assert by_model("loralane_time_to_first_token_seconds_count", lane="interactive") == {BASE: 1, SMALL: 1}
    assert by_model("vllm:time_to_first_token_seconds_count") == {BASE: 1, SMALL: 1}
    assert by_model("vllm:request_success_total", finished_reason="stop") == {BASE: 1, SMALL: 1}
    assert by_model("loralane_requests_total", finish="stop") == {BASE: 1, SMALL: 1}
    assert by_model("loralane_requests_total", finish="error") == {"": 1}, "the model was not known"
    assert set(by_model("loralane_tokens_total", tenant="acme", direction="completion")) == {BASE, SMALL}
    assert by_model("loralane_adapter_requests_total", adapter="sailor") == {SMALL: 1}
    assert set(by_model("loralane_adapter_tokens_total", adapter="sailor", direction="prompt")) == {SMALL}
    assert set(by_model("loralane_slo_goal_seconds", lane="batch", goal="ttft")) == {BASE, SMALL}


async def test_operators_see_all_models_or_one(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        lanes = (await client.get("/admin/v1/lanes")).json()["lanes"]
        assert [(one["model"], one["lane"]) for one in lanes] == [
            (model, lane) for model in (BASE, SMALL) for lane in ("interactive", "batch")
        ]
        one = (await client.get("/admin/v1/overview", params={"model": SMALL, "sections": "engine,lanes"})).json()
        assert (one["engine"]["served_name"], {lane["model"] for lane in one["lanes"]}) == (SMALL, {SMALL})
        assert (await client.get("/admin/v1/overview")).json()["engine"]["served_name"] == BASE
        unclear = await client.post("/admin/v1/lanes/batch/pause")
        assert (unclear.status_code, unclear.json()["error"]["param"]) == (400, "model")
        paused = await client.post("/admin/v1/lanes/batch/pause", params={"model": SMALL})
        assert (paused.json()["model"], paused.json()["mode"]) == (SMALL, "paused")
        lanes = (await client.get("/admin/v1/lanes")).json()["lanes"]
        assert [one["model"] for one in lanes if one["mode"] == "paused"] == [SMALL]
        assert (await client.get("/admin/v1/history", params={"model": SMALL})).status_code == 200
        assert (await client.get("/admin/v1/lanes", params={"model": "other"})).status_code == 400
        engine_of(gateway_app).ready = False
        gateway_app.operations.forget()
        lanes = (await client.get("/admin/v1/lanes")).json()["lanes"]
        assert {one["model"] for one in lanes} == {BASE}, "an engine that is away hides no other"


async def test_the_overview_shows_the_other_models_while_the_first_is_away(gateway_app):
    gateway_app.engine.ready = False
    async with gateway_app.client("sk-admin") as client:
        answer = await client.get("/admin/v1/overview")
        seen = answer.json()
        assert (answer.status_code, seen["engine"]["served_name"], seen["models"]) == (200, SMALL, [BASE, SMALL])
        assert {lane["model"] for lane in seen["lanes"]} == {SMALL}
        named = await client.get("/admin/v1/overview", params={"model": BASE})
        assert (named.status_code, named.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_a_request_that_may_be_with_an_engine_that_is_away_is_not_said_to_be_unknown(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        cancel = "/admin/v1/requests/0123456789abcdef/cancel"
        assert (await client.post(cancel)).status_code == 404
        engine_of(gateway_app).ready = False
        answer = await client.post(cancel)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert f"that of {SMALL} is away" in answer.json()["error"]["message"]


async def test_grpc_serves_and_administers_both_models(tmp_path):
    async with open_grpc_app(tmp_path, others={SMALL: small_engine()}) as api:
        await add_sailor(api.gateway_app, tmp_path)
        sampling = {"max_tokens": 30, "logprobs": 0}
        answer = await api.generation.Generate(ask("mate", sampling=sampling), metadata=as_key())
        [choice] = answer.choices
        assert (choice.text, "".join(token.token for token in choice.logprobs[:-1])) == (HELLO, HELLO)
        tokens = await api.generation.Tokenize(TokenizeRequest(model=SMALL, prompt="hi"), metadata=as_key())
        assert tokens.max_model_len == SMALL_CONTEXT
        listed = (await api.generation.ListModels(ListModelsRequest(), metadata=as_key())).models
        async with api.gateway_app.client() as client:
            cards = (await client.get("/v1/models")).json()["data"]
        facts = ("id", "root", "created", "max_model_len", "weights")
        assert [[getattr(one, fact) for fact in facts] for one in listed] == [
            [card[fact] for fact in facts] for card in cards
        ]
        assert [one.parent or None for one in listed] == [card["parent"] for card in cards]
        assert {one.id for one in listed} >= {BASE, SMALL, "pirate", "mate"}
        source = str(made_for(tmp_path, "cook", SMALL))
        load = adapters.LoadAdapterRequest(name="cook", path=source)
        assert (await api.admin.Load(load, metadata=as_key("admin"))).base_model == SMALL
        load = adapters.LoadAdapterRequest(name="mop", path=str(write_adapter(tmp_path, "mop")))
        refusal = await refused(api.admin.Load(load, metadata=as_key("admin")))
        assert (refusal.code, refusal.fields) == ("INVALID_ARGUMENT", ["base_model"])
        lanes, requests = LaneAdminStub(api.channel), RequestAdminStub(api.channel)
        listed = await lanes.List(operations.ListLanesRequest(model=SMALL), metadata=as_key("admin"))
        assert {lane.model for lane in listed.lanes} == {SMALL}
        found = await requests.List(operations.ListRequestsRequest(), metadata=as_key("admin"))
        assert found.total == 0


async def test_grpc_health_is_serving_while_some_model_is_and_has_a_status_for_each(tmp_path):
    serving, away = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
    async with open_grpc_app(tmp_path, others={SMALL: small_engine()}) as api:

        async def statuses() -> list[int]:
            names = ("", "loralane.v1.Generation", BASE, SMALL)
            return [(await api.health.Check(HealthCheckRequest(service=name))).status for name in names]

        assert await statuses() == [serving] * 4
        engine_of(api.gateway_app).ready = False
        assert await statuses() == [serving, serving, serving, away]
        api.gateway_app.engine.ready = False
        assert await statuses() == [away] * 4
        listed = await api.health.List(HealthListRequest())
        assert {"", BASE, SMALL, "loralane.v1.Generation"} <= set(listed.statuses)
        unknown = await refused(api.health.Check(HealthCheckRequest(service="other")))
        assert unknown.code == "NOT_FOUND"
        engine_of(api.gateway_app).ready = api.gateway_app.engine.ready = True
