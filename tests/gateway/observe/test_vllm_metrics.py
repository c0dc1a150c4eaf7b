"""What vLLM's example Grafana boards ask for, in our /metrics."""

import pytest
from fakes import BASE, build_gateway_app
from prometheus_client.parser import text_string_to_metric_families

from engine.pb import engine_pb2 as pb

CHAT = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "n": 2}

HISTOGRAMS = (
    *("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds"),
    *("time_per_output_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
    "request_inference_time_seconds",
    *("request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens", "iteration_tokens_total"),
)
COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "request_success_total", "num_preemptions_total")
CACHE = ("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_cached_total")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_sleep_state")


@pytest.fixture
async def gateway_app(tmp_path):
    gateway_app = await build_gateway_app(tmp_path, open_metrics="no_tenants")
    gateway_app.engine.picture = pb.EngineStats(
        prompt_tokens=70,
        cached_tokens=30,
        generated_tokens=9,
        steps=12,
        step_tokens=pb.Buckets(bounds=[1, 2, 4], counts=[5, 0, 3, 4], sum=49),
        preemptions_by_cause={"pages": 2, "adapter": 1},
    )
    async with gateway_app.client() as client:
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/chat/completions", json={**CHAT, "model": BASE, "n": 1, "service_tier": "flex"})
        await client.post("/v1/chat/completions", json={**CHAT, "model": "unknown"})
    return gateway_app


async def scraped(gateway_app, key):
    async with gateway_app.client(key) as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    return answer.text, [s for family in text_string_to_metric_families(answer.text) for s in family.samples]


async def read(gateway_app):
    """Give the sum of the series that `name{model_name="BASE",engine="0"}` selects; None means that there is none."""
    _, samples = await scraped(gateway_app, "sk-admin")

    def value(name, **labels):
        wanted = {"model_name": BASE, "engine": "0", **labels}
        found = [s.value for s in samples if s.name == f"vllm:{name}" and wanted.items() <= s.labels.items()]
        return sum(found) if found else None

    return value


async def test_every_query_of_the_board_finds_a_series(gateway_app):
    value = await read(gateway_app)
    names = [*COUNTERS, *CACHE, *GAUGES]
    names += [f"{name}{part}" for name in HISTOGRAMS for part in ("_bucket", "_sum", "_count")]
    assert [name for name in names if value(name) is None] == []
    assert [name for name in HISTOGRAMS if value(f"{name}_bucket", le="+Inf") != value(f"{name}_count")] == []
    assert [name for name in HISTOGRAMS if not value(f"{name}_count")] == []


async def test_the_values_are_those_of_the_requests(gateway_app):
    value = await read(gateway_app)
    records = [record for record in gateway_app.watcher.records if record.times.submitted]
    assert len(records) == 2  # the third never came to the engine
    assert value("request_success_total") == value("e2e_request_latency_seconds_count") == 2
    assert value("request_success_total", finished_reason="stop") == 2
    assert value("request_success_total", finished_reason="abort") == 0
    assert value("request_prompt_tokens_sum") == sum(record.work.prompt_tokens for record in records)
    assert value("request_generation_tokens_sum") == sum(record.work.completion_tokens for record in records)
    assert value("request_generation_tokens_count") == 3
    assert value("request_max_num_generation_tokens_count") == 2
    assert (value("request_params_n_sum"), value("request_params_max_tokens_sum")) == (3, 40)
    assert value("time_to_first_token_seconds_count") == 2
    assert value("time_to_first_token_seconds_sum") == pytest.approx(sum(r.times.ttft_seconds for r in records))
    for name in ("inference", "prefill", "decode"):
        seconds = sum(getattr(record.times, f"{name}_seconds") for record in records)
        assert value(f"request_{name}_time_seconds_sum") == pytest.approx(seconds)
    assert value("prompt_tokens_total") == value("prefix_cache_queries_total") == 70
    assert (value("prefix_cache_hits_total"), value("generation_tokens_total")) == (30, 9)
    assert value("prompt_tokens_cached_total") == 30
    assert (value("iteration_tokens_total_count"), value("iteration_tokens_total_sum")) == (12, 49)
    assert [value("iteration_tokens_total_bucket", le=le) for le in ("1.0", "2.0", "4.0", "+Inf")] == [5, 5, 8, 12]
    assert value("num_preemptions_total") == 3


async def test_the_board_of_services_calls_an_engine_that_answers_online(gateway_app):
    value = await read(gateway_app)
    assert value("engine_sleep_state", sleep_state="awake") == value("engine_sleep_state") == 1


async def test_a_scrape_without_a_key_learns_all_but_tenants(gateway_app):
    gateway_app.engine.picture = pb.EngineStats(tenants=[pb.TenantStats(tenant="acme", lane=pb.LANE_BATCH, running=1)])
    open_text, open_samples = await scraped(gateway_app, None)
    full_text, full_samples = await scraped(gateway_app, "sk-admin")
    assert 'tenant="acme"' in full_text
    assert "acme" not in open_text
    assert "tenant=" not in open_text
    hidden = {s.name for s in full_samples} - {s.name for s in open_samples}
    assert hidden == {s.name for s in full_samples if s.name.startswith("loralane_tenant_")}

    def tokens(samples):
        return sum(s.value for s in samples if s.name == "loralane_tokens_total")

    assert tokens(open_samples) == tokens(full_samples) > 0


@pytest.mark.parametrize(("key", "status"), [("sk-wrong", 401), ("sk-acme", 403)])
async def test_a_key_that_may_not_scrape_is_refused_all_the_same(gateway_app, key, status):
    async with gateway_app.client(key) as client:
        assert (await client.get("/metrics")).status_code == status
