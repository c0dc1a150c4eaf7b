"""What operators see of the lanes, live requests and engines of base models, made from what the engines tell."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Literal

from msgspec import Struct

from engine.core.config import LaneGoals
from engine.core.messages.requests import Lane
from engine.pb import engine_pb2 as pb
from engine.rpc.wire import lane_mode_from_pb
from gateway.observe.latency import ITL, TTFT, Latency, Percentiles

LaneName = Literal["interactive", "batch"]
LANE_NAMES: Mapping[Lane, LaneName] = {Lane.INTERACTIVE: "interactive", Lane.BATCH: "batch"}
LANES: Mapping[str, Lane] = {name: lane for lane, name in LANE_NAMES.items()}


class LaneStatus(Struct, frozen=True):
    lane: LaneName
    model: str
    """Name of the base model whose lane it is."""
    mode: Literal["open", "paused", "draining"]
    running: int
    waiting: int
    oldest_wait_seconds: float
    slo_ttft_attainment: float
    """Share of recent first tokens that came within their goal; 1 if there were none."""
    slo_itl_attainment: float
    preemptions: int
    """Number of preemptions in this lane since the engine started."""
    device_seconds: float
    ttft_seconds: Percentiles
    itl_seconds: Percentiles
    window_seconds: float
    """Length of the time window of the percentiles, in seconds."""
    ttft_goal_seconds: float
    itl_goal_seconds: float
    attainment_goal: float
    """Share of tokens (0 to 1) that the lane promises to deliver within its goals."""


class LiveRequest(Struct, frozen=True):
    id: str
    request_id: str
    """Request id of the caller; it need not be unique."""
    tenant: str
    key: str
    """Short id of the API key."""
    model: str
    base_model: str
    adapter: str
    """Name of the adapter; empty means the base model."""
    lane: LaneName
    state: Literal["queued", "running"]
    answers: int
    """Number of answers that are still live; the request may have asked for more."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    max_tokens: int
    preemptions: int
    age_seconds: float
    started: float
    """When the engine received the request, in Unix seconds."""


class LiveRequests(Struct, frozen=True):
    """Live requests of all gateway processes that share the engines. `total` counts their answers, listed or not."""

    requests: list[LiveRequest]
    total: int
    """Number of live answers, listed or not. A request may have several answers."""


class EngineStatus(Struct, frozen=True):
    """State of the engine. Pages are pages of its pool; steps and tokens are totals since the engine started."""

    served_name: str
    """Name by which callers ask for the base model."""
    model: str
    """Folder or file that the engine has loaded."""
    device: str
    tokens_per_second: float | None
    """Generated tokens per second between the last two samples, five seconds apart; None if there are none."""
    steps: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    total_pages: int
    free_pages: int
    kv_pages: int
    cached_pages: int
    adapter_pages: int


def lane_status(model: str, stats: pb.LaneStats, latency: Latency, goals: LaneGoals) -> LaneStatus:
    """Return the status of a lane of a base model, from the engine's counters, the gateway's latencies and the lane's
    goals."""
    lane = Lane(stats.lane)
    return LaneStatus(
        lane=LANE_NAMES[lane],
        model=model,
        mode=lane_mode_from_pb(stats.mode).value,
        running=stats.running,
        waiting=stats.waiting,
        oldest_wait_seconds=stats.oldest_wait_seconds,
        slo_ttft_attainment=stats.slo_ttft_attainment,
        slo_itl_attainment=stats.slo_itl_attainment,
        preemptions=stats.preemptions,
        device_seconds=stats.device_seconds,
        ttft_seconds=latency.get(TTFT, model, lane),
        itl_seconds=latency.get(ITL, model, lane),
        window_seconds=latency.window_seconds,
        ttft_goal_seconds=goals.ttft_s,
        itl_goal_seconds=goals.itl_s,
        attainment_goal=goals.attainment,
    )


def grouped(model: str, answers: Sequence[pb.LiveRequest]) -> list[LiveRequest]:
    """Group live answers, as the engine lists them, into requests. Returns running requests first, then waiting ones,
    the oldest of each first."""
    by_id = sorted(answers, key=attrgetter("origin.id"))
    requests = [live_request(model, list(group)) for _, group in groupby(by_id, key=attrgetter("origin.id"))]
    return sorted(requests, key=running_first)


def running_first(request: LiveRequest) -> tuple[bool, float]:
    """Sort key of live requests: the running ones, then the waiting ones, the oldest of each first."""
    return request.state == "queued", -request.age_seconds


def live_request(base_model: str, answers: Sequence[pb.LiveRequest]) -> LiveRequest:
    """Combine the live answers of one request, as the engine lists them, into one `LiveRequest`."""
    first = min(answers, key=attrgetter("request_id"))
    age = max(answer.age_seconds for answer in answers)
    return LiveRequest(
        id=first.origin.id,
        request_id=first.origin.request_id,
        tenant=first.tenant,
        key=first.origin.key,
        model=first.origin.model,
        base_model=base_model,
        adapter=first.origin.adapter,
        lane=LANE_NAMES[Lane(first.lane)],
        state="running" if any(answer.running for answer in answers) else "queued",
        answers=len(answers),
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        generated_tokens=sum(answer.generated_tokens for answer in answers),
        max_tokens=sum(answer.max_tokens for answer in answers),
        preemptions=sum(answer.preemptions for answer in answers),
        age_seconds=round(age, 3),
        started=round(time.time() - age, 3),
    )
