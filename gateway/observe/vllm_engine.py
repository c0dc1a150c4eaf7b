"""Figures of an engine under the names that dashboards and autoscalers made for vLLM query."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine.pb import engine_pb2 as pb
from gateway.observe.buckets import spread
from gateway.observe.vllm_requests import ENGINE, LABELS

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


def vllm_metrics(stats: pb.EngineStats, model: str) -> Iterator[Metric]:
    """Yield figures of the engine under the names that dashboards and autoscalers made for vLLM query."""
    usage = stats.kv_pages / stats.total_pages if stats.total_pages else 0.0
    gauges = {
        "num_requests_running": ("Running requests.", sum(lane.running for lane in stats.lanes)),
        "num_requests_waiting": ("Waiting requests.", sum(lane.waiting for lane in stats.lanes)),
        "kv_cache_usage_perc": ("Share of the pool that holds KV cache in use, from 0 to 1.", usage),
    }
    counters = {
        "prompt_tokens": ("Prompt tokens computed, or found in the prefix cache.", stats.prompt_tokens),
        "prompt_tokens_cached": ("Prompt tokens found in the prefix cache.", stats.cached_tokens),
        "generation_tokens": ("Tokens sampled.", stats.generated_tokens),
        "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prompt_tokens),
        "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.cached_tokens),
        "num_preemptions": ("Requests preempted.", sum(stats.preemptions_by_cause.values())),
    }
    kinds: tuple[tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], dict[str, tuple[str, float]]], ...]
    kinds = ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters))
    for kind, series in kinds:
        for name, (help, value) in series.items():
            family = kind(f"vllm:{name}", help, labels=LABELS)
            family.add_metric([model, ENGINE], value)
            yield family
    steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens per engine step.", labels=LABELS)
    steps.add_metric([model, ENGINE], *spread(stats.step_tokens))
    yield steps
    yield _sleep_state(model)


def _sleep_state(model: str) -> Metric:
    """Return the sleep state gauge, which is always `awake`. Without it, vLLM's dashboard shows the server as down."""
    family = GaugeMetricFamily("vllm:engine_sleep_state", "1 for the state it is in.", labels=(*LABELS, "sleep_state"))
    for state in SLEEP_STATES:
        family.add_metric([model, ENGINE, state], float(state == "awake"))
    return family
