"""What the endpoint pickers of llm-d and of the Gateway API Inference Extension choose from our metrics.

The pickers' rules are written down here from their documents: the newest series of `vllm:lora_requests_info` says which
adapters are active and how many fit; an active adapter scores 1.0, room for another 0.8, an adapter of waiting requests
0.6. The rules proposed for `vllm:lora_adapter_loaded` are device 1.0, host 0.7, a free slot 0.6, an idle adapter that
can be evicted 0.3, and 0 otherwise.
"""

from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.pb import engine_pb2 as pb
from gateway.observe.engine_metrics import EngineMetrics, EngineSnapshot

NAMES = {"hash-a": ["a"], "hash-b": ["b"], "hash-c": ["c", "alias-of-c"], "hash-d": ["d"]}


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict
    value: float


def scrape(*adapters, most=2, **figures):
    """Return the samples of an engine's /metrics, parsed from its text as a picker does."""
    stats = pb.EngineStats(adapters=adapters, max_resident_adapters=most, total_pages=100, **figures)
    registry = CollectorRegistry()
    registry.register(EngineMetrics([EngineSnapshot("base", pb.EngineInfo(), stats, NAMES)], ()))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return [Sample(s.name, s.labels, s.value) for family in families for s in family.samples]


def stats(letter, state, **figures):
    return pb.AdapterStats(adapter=f"hash-{letter}", state=state, rank=16, **figures)


def affinity(samples, adapter):
    """Score an engine for an adapter by `vllm:lora_requests_info`."""
    info = max((s for s in samples if s.name == "vllm:lora_requests_info"), key=lambda s: s.value).labels
    active, waiting = (
        [name for name in info[key].split(",") if name] for key in ("running_lora_adapters", "waiting_lora_adapters")
    )
    if adapter in active:
        return 1.0
    if len(active) + len(waiting) < int(info["max_lora"]):
        return 0.8
    return 0.6 if adapter in waiting else 0.0


def residency(samples, adapter):
    """Score an engine for an adapter by `vllm:lora_adapter_loaded`."""
    loaded = [s.labels for s in samples if s.name == "vllm:lora_adapter_loaded" and s.value == 1]
    levels = {labels["level"] for labels in loaded if labels["adapter_name"] == adapter}
    if "gpu" in levels:
        return 1.0
    if "cpu" in levels:
        return 0.7
    resident, most = (
        next(s.value for s in samples if s.name == f"vllm:{name}")
        for name in ("num_gpu_loaded_lora_adapters", "max_gpu_lora_adapters")
    )
    if resident < most:
        return 0.6
    pinned = sum(labels["pinned"] == "true" for labels in loaded if labels["level"] == "gpu")
    return 0.3 if pinned < resident else 0.0


ENGINES = {
    "resident and idle": scrape(stats("c", "resident"), stats("a", "resident", running=1)),
    "in host memory": scrape(stats("c", "host"), stats("a", "resident"), stats("b", "resident")),
    "full": scrape(stats("a", "resident"), stats("b", "resident", running=1), stats("c", "disk")),
    "waiting": scrape(stats("a", "resident"), stats("b", "resident"), stats("c", "fetching", waiting=1)),
}


@pytest.mark.parametrize("score", [affinity, residency])
@pytest.mark.parametrize("adapter", ["c", "alias-of-c"])
def test_the_engine_that_has_the_adapter_is_picked(score, adapter):
    scores = {name: score(samples, adapter) for name, samples in ENGINES.items()}
    assert max(scores, key=scores.get) == "resident and idle"
    assert sorted(scores.values())[-2] < scores["resident and idle"] == 1.0


def test_an_engine_whose_requests_wait_for_the_adapter_comes_before_one_that_is_full():
    assert affinity(ENGINES["waiting"], "c") == 0.6
    assert affinity(ENGINES["full"], "c") == 0.0


def test_an_engine_with_room_is_picked_for_an_adapter_that_none_has():
    room = scrape(stats("a", "resident"))
    assert (affinity(room, "d"), affinity(ENGINES["full"], "d")) == (0.8, 0.0)
    assert (residency(room, "d"), residency(ENGINES["full"], "d")) == (0.6, 0.3)


def test_pinned_adapters_leave_no_room():
    pinned = scrape(stats("a", "resident", pinned=True), stats("b", "resident", pinned=True))
    assert residency(pinned, "d") == 0.0


def test_host_memory_comes_before_disk():
    assert residency(ENGINES["in host memory"], "c") == 0.7
    assert residency(ENGINES["full"], "c") == 0.3


def test_loads_are_counted_and_timed():
    samples = scrape(adapter_loads=4, adapter_load_seconds=0.5)
    values = {s.name: s.value for s in samples if s.name.startswith("vllm:lora_adapter_load_seconds")}
    assert values["vllm:lora_adapter_load_seconds_count"] == 4
    assert values["vllm:lora_adapter_load_seconds_sum"] == 0.5
