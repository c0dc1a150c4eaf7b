import pytest
from fakes import BASE, DEFAULT_GOALS, GatewayApp, build_gateway_app, ids_of
from prometheus_client.parser import text_string_to_metric_families
from records import make_record

from engine.pb import engine_pb2 as pb
from gateway.observe.engine_metrics import MAX_TENANTS as NAMED
from gateway.observe.engine_metrics import EngineSnapshot
from gateway.observe.metrics import Metrics
from gateway.observe.tenant_labels import MAX_TENANTS
from gateway.requests.record import Charge, RequestRecord

CHAT = {"model": "poet", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


def samples(text):
    """(name, labels) to value."""
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


async def scrape(gateway_app):
    async with gateway_app.client("sk-admin") as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = samples(response.text)

    def value(name, **labels):
        """Give the value of a series; what is by base model is that of the only one."""
        of_base = found.get((name, frozenset({"model_name": BASE, **labels}.items())))
        return found.get((name, frozenset(labels.items())), of_base)

    return value


def record(**fields) -> RequestRecord:
    return make_record(base_model=BASE, **fields)


async def test_requests_are_measured_by_lane(gateway_app):
    async with gateway_app.client() as client:
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/chat/completions", json={**CHAT, "service_tier": "flex"})
        await client.post("/v1/chat/completions", json={**CHAT, "model": "unknown"})
    value = await scrape(gateway_app)
    for name in ("time_to_first_token", "time_per_output_token", "request_duration", "queue_time"):
        assert value(f"loralane_{name}_seconds_count", lane="batch") == 1
    num_tokens = len(ids_of("Hello, world!")) + 1
    assert value("loralane_inter_token_latency_seconds_count", lane="interactive") == num_tokens - 1
    assert value("loralane_requests_total", lane="batch", finish="stop", code="") == 1
    assert (
        value("loralane_requests_total", model_name="", lane="interactive", finish="error", code="model_not_found") == 1
    )
    assert value("loralane_tokens_total", tenant="acme", lane="batch", direction="completion") == num_tokens
    assert value("loralane_limiter_decisions_total", decision="admitted") == 2


async def test_the_engines_state_is_that_of_the_scrape(gateway_app):
    value = await scrape(gateway_app)
    assert value("loralane_requests_running", lane="interactive") == 2
    assert value("loralane_requests_waiting", lane="batch") == 0
    labels = {"model_name": BASE, "engine": "0"}
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [value(f"vllm:{name}", **labels) for name in gauges] == [2, 1, 0.4]
    assert (value("loralane_free_pages"), value("loralane_steps_total")) == (50, 7)
    labels = {"max_lora": "8", "running_lora_adapters": "pirate,poet", "waiting_lora_adapters": ""}
    assert value("vllm:lora_requests_info", **labels) > 1e9
    assert value("loralane_limiter_mode", mode="degraded") == 1
    assert value("loralane_limiter_mode", mode="redis") == 0


async def test_where_adapters_are_and_what_bringing_them_took(gateway_app):
    versions = {name: record.version for name, record in gateway_app.adapters.records.items()}
    gateway_app.engine.picture = pb.EngineStats(
        adapters=[
            pb.AdapterStats(adapter=versions["pirate"], state="host", waiting=1),
            pb.AdapterStats(adapter=versions["poet"], state="resident", running=2),
            pb.AdapterStats(adapter="unknown", state="disk", running=1),
        ],
        adapter_loads=7,
        adapter_evictions=6,
        adapter_fetches=5,
        adapter_fetch_failures=4,
        adapter_host_evictions=3,
        adapter_fetch_seconds=1.5,
        adapter_load_seconds=0.25,
        adapter_host_total_bytes=2000,
        adapter_host_used_bytes=1500,
        max_resident_adapters=8,
    )
    await gateway_app.adapters.load("twin", "poet")
    value = await scrape(gateway_app)
    tiers = {"disk": 1, "fetching": 0, "host": 1, "resident": 1}
    assert {tier: value("loralane_adapters", tier=tier) for tier in tiers} == tiers
    counters = {"loads": 7, "evictions": 6, "fetches": 5, "fetch_failures": 4, "host_evictions": 3}
    assert {name: value(f"loralane_adapter_{name}_total") for name in counters} == counters
    assert value("loralane_adapter_load_seconds_total", tier="host") == 1.5
    assert value("loralane_adapter_load_seconds_total", tier="device") == 0.25
    assert (value("loralane_adapter_host_total_bytes"), value("loralane_adapter_host_used_bytes")) == (2000, 1500)
    labels = {"max_lora": "8", "running_lora_adapters": "poet,twin", "waiting_lora_adapters": "pirate"}
    assert value("vllm:lora_requests_info", **labels) > 1e9


LANE_NAMES = ("interactive", "batch")
LANES = [
    pb.LaneStats(
        lane=pb.LANE_INTERACTIVE,
        running=2,
        waiting=1,
        oldest_wait_seconds=0.5,
        slo_ttft_attainment=0.875,
        device_seconds=12.5,
        vtc_gap_seconds=0.25,
        vtc_bound_seconds=2.0,
    ),
    pb.LaneStats(lane=pb.LANE_BATCH, mode=pb.LANE_MODE_PAUSED, slo_itl_attainment=0.5, device_seconds=3.5),
]
PICTURE = pb.EngineStats(
    lanes=LANES,
    step_predicted_seconds_total=9.5,
    step_actual_seconds_total=10.0,
    step_error_median=0.03125,
    step_margin=1.125,
    host_total_pages=64,
    host_used_pages=16,
    pages_saved=21,
    pages_restored=20,
    kv_fetches={"done": 4, "late": 1},
    kv_pages_in=30,
    preemptions=5,
    preemptions_by_cause={"pages": 3, "adapter_pages": 2},
    batch_urgency=0.5,
    batch_share=0.75,
)


async def test_what_the_scheduler_does_can_be_seen(gateway_app):
    gateway_app.engine.picture = PICTURE
    value = await scrape(gateway_app)
    assert value("loralane_oldest_wait_seconds", lane="interactive") == 0.5
    assert value("loralane_lane_device_seconds_total", lane="batch") == 3.5
    modes = {"open": (1, 0), "paused": (0, 1), "draining": (0, 0)}
    told = {mode: tuple(value("loralane_lane_mode", lane=lane, mode=mode) for lane in LANE_NAMES) for mode in modes}
    assert told == modes, "a lane that an operator paused and forgot shows"
    assert value("loralane_slo_attainment", lane="interactive", goal="ttft") == 0.875
    assert value("loralane_slo_attainment", lane="batch", goal="itl") == 0.5
    assert (value("loralane_vtc_gap_seconds", lane="interactive"), value("loralane_vtc_gap_seconds", lane="batch")) == (
        0.25,
        0,
    )
    assert value("loralane_vtc_bound_seconds", lane="interactive") == 2.0
    assert value("loralane_preemptions_total", cause="pages") == 3
    assert value("loralane_kv_fetches_total", end="late") == 1
    assert value("loralane_preemptions_total", cause="adapter_pages") == 2
    plain = {
        "step_predicted_seconds_total": 9.5,
        "step_actual_seconds_total": 10.0,
        "step_error_median": 0.03125,
        "step_margin": 1.125,
        "host_total_pages": 64,
        "host_used_pages": 16,
        "pages_saved_total": 21,
        "pages_restored_total": 20,
        "kv_pages_in_total": 30,
        "batch_urgency": 0.5,
        "batch_share": 0.75,
    }
    assert {name: value(f"loralane_{name}") for name in plain} == plain


async def test_the_tenants_served_most_have_a_label_of_their_own(gateway_app):
    def tenant(number, lane, **more):
        return pb.TenantStats(lane=lane, tenant=f"t{number}", device_seconds=number, running=1, **more)

    few = [tenant(number, pb.LANE_BATCH, served_seconds=2.0 * number) for number in range(1, NAMED + 3)]
    lifted = tenant(2, pb.LANE_INTERACTIVE)
    lifted.device_seconds = 1000.0
    gateway_app.engine.picture = pb.EngineStats(tenants=[*few, lifted])
    value = await scrape(gateway_app)
    names = [tenant.tenant for tenant in few]
    seconds = {name: value("loralane_tenant_device_seconds", lane="batch", tenant=name) for name in names}
    assert seconds == {name: None if name in ("t1", "t3") else float(name[1:]) for name in seconds}
    assert value("loralane_tenant_device_seconds", lane="batch", tenant="other") == 1 + 3
    assert value("loralane_tenant_requests_running", lane="batch", tenant="other") == 2
    assert value("loralane_tenant_device_seconds", lane="interactive", tenant="t2") == 1000
    assert value("loralane_tenant_served_seconds", lane="batch", tenant=f"t{NAMED}") == 2.0 * NAMED
    assert value("loralane_tenant_served_seconds", lane="batch", tenant="other") is None


async def test_every_metric_says_what_it_is(gateway_app):
    gateway_app.engine.picture = PICTURE
    async with gateway_app.client("sk-admin") as client:
        text = (await client.get("/metrics")).text
    families = list(text_string_to_metric_families(text))
    assert [family.name for family in families if not family.documentation] == []
    assert len({family.name for family in families}) == len(families)


async def test_a_scrape_does_not_ask_for_the_integrity_check(gateway_app, monkeypatch):
    asked = []
    stats = gateway_app.engine.stats

    async def watched(**options):
        asked.append(options)
        return await stats(**options)

    monkeypatch.setattr(gateway_app.engine, "stats", watched)
    await scrape(gateway_app)
    assert asked == [{}]


async def test_metrics_outlive_the_engine(gateway_app):
    gateway_app.engine.ready = False
    value = await scrape(gateway_app)
    assert value("loralane_engine_up") == 0
    assert value("vllm:num_requests_running") is None


async def test_refunded_and_refused_requests_charge_no_tokens(gateway_app):
    gateway_app.engine.fail_after = 3
    async with gateway_app.client() as client:
        await client.post("/v1/chat/completions", json=CHAT)
    async with gateway_app.client("sk-globex") as client:
        await client.post("/v1/chat/completions", json={**CHAT, "model": "pirate", "max_tokens": 200})
    value = await scrape(gateway_app)
    assert value("loralane_tokens_total", tenant="acme", lane="interactive", direction="prompt") is None
    assert value("loralane_limiter_decisions_total", decision="insufficient_quota") == 1


def test_tenants_beyond_the_bound_share_a_label():
    metrics = Metrics({BASE: DEFAULT_GOALS})
    for number in range(MAX_TENANTS + 5):
        metrics.finished(record(tenant=f"t{number}", charge=Charge.DUE, prompt_tokens=1, finish="stop"))
    found = samples(metrics.render([EngineSnapshot(BASE, pb.EngineInfo(), None, {})], "redis").decode())
    prompts = {
        dict(labels)["tenant"]: value
        for (name, labels), value in found.items()
        if ("direction", "prompt") in labels and name.endswith("_total")
    }
    assert len(prompts) == MAX_TENANTS + 1
    assert prompts["other"] == 5
