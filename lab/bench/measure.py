"""Measures a run lane by lane, and as a whole. Throughput and latency are separate figures and are never combined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lab.bench.spec import LatencyObjective
from lab.bench.stream import Stream


@dataclass(frozen=True, slots=True)
class BenchPercentiles:
    """Mean, standard deviation and percentiles of latencies in seconds, and the number of samples. Percentiles are
    interpolated linearly."""

    mean: float
    std: float
    p50: float
    p90: float
    p95: float
    p99: float
    samples: int


@dataclass(frozen=True, slots=True)
class Goodput:
    """How many of a lane's requests met the lane's objective `slo`. A failed request does not meet it."""

    slo: LatencyObjective
    met: int
    attainment: float
    """Share of all requests that met the objective, 0 to 1."""
    requests_per_second: float


@dataclass(frozen=True, slots=True)
class LaneResults:
    """Results of one lane. Latencies, tokens and rates are of requests that succeeded; None means no samples."""

    lane: str
    requests: int
    succeeded: int
    errors: dict[str, int]
    """Number of failed requests by kind of error."""
    seconds: float
    """Span of the lane in seconds: from its first request to the end of its last answer."""
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    """Prompt tokens that the server computed (not those of its prefix cache) per second of the span."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    asked_tokens: int
    """Output tokens that the requests that succeeded asked for. The server stopped early if output_tokens is less."""
    tokens_per_chunk: float
    """Mean tokens per arrival. Above 1, an ITL is a gap between groups of tokens; TPOT is still the time per token."""
    ttft: BenchPercentiles | None
    itl: BenchPercentiles | None
    tpot: BenchPercentiles | None
    e2e: BenchPercentiles | None
    late_p99: float
    """99th percentile of the seconds by which the client sent requests after their arrival times."""
    busy: float
    """Share of the span with at least one request in flight, 0 to 1."""
    goodput: Goodput | None = None
    """None means that the lane has no objective."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of tokens on the measured server at a price, in the price's currency."""

    price_per_hour: float
    per_million_output: float
    """Price of a million output tokens if the whole cost is charged to output tokens and prompt tokens are free."""
    per_million: float
    """Price of a million tokens, of prompts (cached ones, too) and answers."""


def cost(results: LaneResults, price_per_hour: float) -> Cost | None:
    """Return the cost of tokens on a server with this price whose throughput is always that of `results`. None means
    that `results` has no output tokens."""
    if not results.output_tokens:
        return None
    per_token = price_per_hour / 3600 * results.seconds / results.output_tokens
    share = results.output_tokens / (results.output_tokens + results.prompt_tokens)
    return Cost(price_per_hour, per_token * 1e6, per_token * share * 1e6)


def percentiles(samples: Sequence[float]) -> BenchPercentiles | None:
    if not samples:
        return None
    p50, p90, p95, p99 = map(float, np.percentile(samples, (50, 90, 95, 99)))
    return BenchPercentiles(float(np.mean(samples)), float(np.std(samples)), p50, p90, p95, p99, len(samples))


def report(lane: str, streams: Sequence[Stream], slo: LatencyObjective | None = None) -> LaneResults:
    """Return the results of one lane, whose outcomes are `streams`, at least one. Without `slo` there is no goodput."""
    good = [stream for stream in streams if succeeded(stream)]
    seconds = max(stream.ended for stream in streams) - min(stream.sent for stream in streams)
    prompt, cached = sum(stream.prompt_tokens for stream in good), sum(stream.cached or 0 for stream in good)
    tokens, chunks = sum(stream.tokens for stream in good), sum(len(stream.times) for stream in good)
    return LaneResults(
        lane=lane,
        requests=len(streams),
        succeeded=len(good),
        errors=dict(Counter(stream.error or "no tokens" for stream in streams if not succeeded(stream))),
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        output_tokens_per_second=tokens / seconds,
        prompt_tokens_per_second=(prompt - cached) / seconds,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=tokens,
        asked_tokens=sum(stream.item.max_tokens for stream in good),
        tokens_per_chunk=tokens / chunks if chunks else 0.0,
        ttft=percentiles([stream.ttft for stream in good]),
        itl=percentiles([gap for stream in good for gap in stream.gaps]),
        tpot=percentiles([stream.tpot for stream in good if stream.tpot is not None]),
        e2e=percentiles([stream.e2e for stream in good]),
        late_p99=float(np.percentile([stream.late for stream in streams], 99)),
        busy=busy_seconds((stream.sent, stream.ended) for stream in streams) / seconds,
        goodput=goodput(streams, slo, seconds) if slo else None,
    )


def goodput(streams: Sequence[Stream], slo: LatencyObjective, seconds: float) -> Goodput:
    met = sum(meets_objective(stream, slo) for stream in streams)
    return Goodput(slo, met, met / len(streams), met / seconds)


def meets_objective(stream: Stream, slo: LatencyObjective) -> bool:
    """Return whether a request succeeded within all limits of the objective. The ITL limit applies to the request's own
    99th percentile, so that one stall in a long answer is tolerated. With one token, ITL and TPOT count as met."""
    if not succeeded(stream):
        return False
    itl = percentiles(stream.gaps)
    taken = ((slo.ttft, stream.ttft), (slo.itl, itl.p99 if itl else 0.0), (slo.tpot, stream.tpot or 0.0))
    return all(limit is None or seconds <= limit for limit, seconds in taken)


def succeeded(stream: Stream) -> bool:
    return stream.error is None and bool(stream.times)


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length in seconds of the union of intervals (start, end), which may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
