"""What operators see of the lanes, live requests and engines of base models, made from what the engines tell."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from engine.core.config import LaneGoals
from engine.core.messages.requests import Lane
from engine.pb import engine_pb2 as pb
from engine.rpc.wire import lane_mode_from_pb
from gateway.api_schema.traffic import LaneStatus, LiveRequest
from gateway.core.lanes import LANE_NAMES
from gateway.observe.latency import ITL, TTFT, Latency

LANES: Mapping[str, Lane] = {name: lane for lane, name in LANE_NAMES.items()}


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
