"""Writes a run in the form of `vllm bench serve --save-result --save-detailed`, which many tools read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np

from lab.bench.document import Settings
from lab.bench.measure import BenchPercentiles, meets_objective, percentiles, succeeded
from lab.bench.run import Outcome
from lab.bench.stream import Stream

LATENCIES = ("ttft", "tpot", "itl", "e2el")


def vllm_result(outcome: Outcome) -> dict[str, Any]:
    """Return the fields that `vllm bench serve` writes, of all lanes together, but for `generated_texts`. Times with
    `_ms` are in milliseconds, others in seconds. As in vLLM, `e2el` ends with the last token."""
    streams, whole, settings = outcome.streams, outcome.document.whole, outcome.document.settings
    good = [stream for stream in streams if succeeded(stream)]
    samples = {
        "ttft": percentiles([stream.ttft for stream in good]),
        "tpot": percentiles([stream.tpot for stream in good if stream.tpot is not None]),
        "itl": percentiles([gap for stream in good for gap in stream.gaps]),
        "e2el": percentiles([_latency(stream) for stream in good]),
    }
    return {
        **_settings(settings, len(streams)),
        "duration": whole.seconds,
        "completed": whole.succeeded,
        "failed": whole.requests - whole.succeeded,
        "total_input_tokens": whole.prompt_tokens,
        "total_output_tokens": whole.output_tokens,
        "request_throughput": whole.requests_per_second,
        "request_goodput": _goodput(settings, streams, whole.seconds),
        "output_throughput": whole.output_tokens_per_second,
        "total_token_throughput": (whole.prompt_tokens + whole.output_tokens) / whole.seconds,
        **_each(streams),
        **_busiest(good),
        **{name: value for key in LATENCIES for name, value in _in_ms(key, samples[key]).items()},
    }


def _settings(settings: Settings, requests: int) -> dict[str, Any]:
    plan, backend = settings.plan, "openai-chat" if settings.chat else "openai"
    lane = plan.lanes[0]
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": "loralane",
        "model_id": plan.models[0],
        "tokenizer_id": None,
        "num_prompts": requests,
        "request_rate": lane.rate or "inf",
        "burstiness": lane.cv**-2,
        "max_concurrency": settings.concurrency,
    }


def _each(streams: Sequence[Stream]) -> dict[str, list[Any]]:
    return {
        "input_lens": [stream.prompt_tokens for stream in streams],
        "output_lens": [stream.tokens if succeeded(stream) else 0 for stream in streams],
        "ttfts": [stream.ttft if stream.times else 0.0 for stream in streams],
        "itls": [stream.gaps for stream in streams],
        "latencies": [_latency(stream) for stream in streams],
        "start_times": [stream.sent for stream in streams],
        "queue_times": [max(0.0, stream.late) for stream in streams],
        "errors": [stream.error or "" for stream in streams],
    }


def _latency(stream: Stream) -> float:
    """Return the seconds from a request's sending to its last token, or to its end if there was none."""
    return (stream.times[-1] if stream.times else stream.ended) - stream.sent


def _goodput(settings: Settings, streams: Sequence[Stream], seconds: float) -> float | None:
    """Return the requests a second that met the objective of their lane. None means that no lane has one."""
    objectives = {lane.name: lane.slo for lane in settings.plan.lanes}
    if not any(objectives.values()):
        return None
    return sum(meets_objective(stream, objectives[stream.item.lane]) for stream in streams) / seconds


def _busiest(good: Sequence[Stream]) -> dict[str, float]:
    """Return the most tokens that arrived within a second, and the most requests in flight during one. Seconds count
    from the first request on."""
    first = min((stream.sent for stream in good), default=0.0)
    last = max((stream.times[-1] for stream in good), default=0.0)
    tokens, requests = np.zeros((2, math.ceil(last - first) + 1), dtype=int)
    for stream in good:
        np.add.at(tokens, (np.array(stream.times) - first).astype(int), stream.chunk_tokens)
        requests[int(stream.sent - first) : int(stream.times[-1] - first) + 1] += 1
    return {"max_output_tokens_per_s": float(tokens.max()), "max_concurrent_requests": int(requests.max())}


def _in_ms(key: str, percentiles: BenchPercentiles | None) -> dict[str, float]:
    if percentiles is None:
        return {f"{name}_{key}_ms": 0.0 for name in ("mean", "median", "std", "p50", "p90", "p95", "p99")}
    values = {"mean": percentiles.mean, "median": percentiles.p50, "std": percentiles.std, "p50": percentiles.p50}
    values |= {"p90": percentiles.p90, "p95": percentiles.p95, "p99": percentiles.p99}
    return {f"{name}_{key}_ms": 1000 * seconds for name, seconds in values.items()}
