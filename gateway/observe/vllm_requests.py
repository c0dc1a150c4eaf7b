"""Request metrics under the names and labels that dashboards and autoscalers for vLLM query.

Latencies that loralane already counts by lane are summed over the lanes at a scrape, which costs requests nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric

from gateway.requests.record import RequestRecord

MODEL = "model_name"
"""Label that has the name of the base model, in every metric that is about one base model. vLLM's metrics have the same
label."""
LABELS = (MODEL, "engine")
ENGINE = "0"
"""Value of the label `engine`. A gateway's engines of one base model count as one; vLLM numbers a server's from 0."""

SECONDS = (0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 60.0, 240.0, 960.0, 3600.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1, 2, 5, 10, 20)

SUMMED = {
    "vllm:time_to_first_token_seconds": "loralane_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "loralane_inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds": "loralane_inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds": "loralane_time_per_output_token_seconds",
    "vllm:request_queue_time_seconds": "loralane_queue_time_seconds",
}
"""vLLM's histogram -> loralane's histogram by lane, which is summed. `time_per_output_token_seconds` is vLLM's older
name of `inter_token_latency_seconds`."""
REASONS = {"stop": "stop", "length": "length", "pooled": "stop", "cancelled": "abort", "error": "error"}
"""Finish of a request record -> vLLM's finished_reason."""


class VllmRequests:
    """Metrics under vLLM's names of requests that were submitted to the engine, registered when an instance is made."""

    def __init__(self, models: Collection[str], registry: CollectorRegistry) -> None:
        """`models`: names of the base models. They label every request, also those of adapters, as in vLLM."""
        self._models = models
        self._registry = registry
        self._duration = self._histogram("e2e_request_latency_seconds", "Arrival to end.", SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "First worked on to first token.", SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", "First token to last.", SECONDS)
        self._inference = self._histogram("request_inference_time_seconds", "First worked on to last token.", SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a request's prompts.", TOKENS)
        self._length = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest answer.", TOKENS
        )
        self._n = self._histogram("request_params_n", "Answers that a prompt asks for.", CHOICES)
        self._max_tokens = self._histogram("request_params_max_tokens", "Most tokens of an answer.", TOKENS)
        ended = Counter("vllm:request_success", "Ended requests.", (*LABELS, "finished_reason"), registry=registry)
        self._ended = {
            (model, finish): ended.labels(model, ENGINE, reason)
            for model, (finish, reason) in product(models, REASONS.items())
        }

    def finished(self, record: RequestRecord) -> None:
        """Count an ended request, its latencies and its tokens. Requests that never reached an engine are left out, as
        in vLLM; so are those that an upstream answered, whose name is no base model's."""
        times, work, model = record.times, record.work, record.served.base_model
        if times.submitted is None or model not in self._models:
            return
        self._ended[model, record.outcome.finish].inc()
        spans = (
            (self._duration, times.duration_seconds),
            (self._prefill, times.prefill_seconds),
            (self._decode, times.decode_seconds),
            (self._inference, times.inference_seconds),
        )
        for histogram, seconds in spans:
            if seconds is not None:
                histogram[model].observe(seconds)
        self._prompt[model].observe(work.prompt_tokens)
        self._n[model].observe(record.asked.n)
        self._max_tokens[model].observe(record.asked.max_tokens)
        for length in work.lengths.values():
            self._length[model].observe(length)
        if work.lengths:
            self._longest[model].observe(max(work.lengths.values()))

    def summed(self, counted: Iterable[Metric]) -> Iterator[Metric]:
        """Yield vLLM's latency histograms (`SUMMED`): those of loralane in `counted`, summed over the lanes."""
        by_name = {family.name: family for family in counted}
        for name, source in SUMMED.items():
            yield self._over_lanes(name, by_name[source])

    def _over_lanes(self, name: str, source: Metric) -> Metric:
        sums: defaultdict[str, defaultdict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
        for sample in source.samples:
            kind = sample.name.removeprefix(source.name), sample.labels.get("le", "")
            sums[sample.labels[LABELS[0]]][kind] += sample.value
        family = HistogramMetricFamily(name, f"{source.documentation} Both lanes.", labels=LABELS)
        for model, values in sums.items():
            buckets = [(bound, value) for (kind, bound), value in values.items() if kind == "_bucket"]
            buckets.sort(key=lambda bucket: float(bucket[0]))
            family.add_metric((model, ENGINE), buckets, values["_sum", ""])
        return family

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Mapping[str, Histogram]:
        """Register a histogram under vLLM's name. Return its series for each base model, by the model's name."""
        histogram = Histogram(f"vllm:{name}", help, LABELS, buckets=buckets, registry=self._registry)
        return {model: histogram.labels(model, ENGINE) for model in self._models}
