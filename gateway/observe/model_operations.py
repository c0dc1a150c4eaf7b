"""What operators see and change of the lanes and live requests of one base model.

The data comes from the engine, which knows the requests of all gateway processes that share it and decides which ones
start. Only the percentiles come from the metrics of this gateway process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from engine.core.config import LaneGoals
from engine.core.types import Lane, LaneMode
from engine.pb import engine_pb2 as pb
from engine.rpc.api import EngineApi, LaneRejected
from engine.rpc.stream import EngineUnavailable
from engine.rpc.wire import lane_mode_from_pb
from gateway.core.errors import Fault, invalid_request, unavailable
from gateway.core.shared_poll import SharedPoll
from gateway.engines.replica import EngineOverview
from gateway.observe.history import History
from gateway.observe.latency import ITL, TTFT, Latency, LatencyWindow, Percentiles
from gateway.observe.metrics import StaticMetrics

LaneName = Literal["interactive", "batch"]
LANE_NAMES: Mapping[Lane, LaneName] = {Lane.INTERACTIVE: "interactive", Lane.BATCH: "batch"}
LANES: Mapping[str, Lane] = {name: lane for lane, name in LANE_NAMES.items()}
MAX_RESTART_SECONDS = 3600
"""Maximum seconds that a restart may wait for requests that no other engine can take over."""
RESTART_SECONDS = 60
"""Seconds that it waits by default."""
ENGINE_ACTIONS = ("drain", "resume", "restart")
MODES: Mapping[str, LaneMode] = {"pause": LaneMode.PAUSED, "drain": LaneMode.DRAINING, "resume": LaneMode.OPEN}
UNPROMISED = 0.95
"""Percentile, as a share from 0 to 1, that charts show for a lane without an attainment goal."""
MOST_LISTED = 200
ALL = 2**32 - 1


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


class Engines(EngineApi, Protocol):
    """What operators see and change of the engines of one base model; `EnginePool` explains it."""

    def overviews(self) -> list[EngineOverview]: ...

    async def drain(self, name: str, draining: bool, *, restart: bool = False, seconds: float = 0.0) -> None: ...


class ModelOperations:
    """Shows the engine of one base model, its lanes, tenants and live requests, sets lane modes and cancels requests.
    Methods that ask the engine raise ApiError: ENGINE_UNAVAILABLE if it does not answer. What they show is cached for
    one second, or until a change made here, for all callers; `answers` and `cancel` look anew."""

    def __init__(self, model: str, engine: Engines, latency: LatencyWindow, static: StaticMetrics) -> None:
        """`model` is the base model's name. `static` holds the lanes' goals, which follow the configuration."""
        self.model = model
        self._engine = engine
        self._latency = latency
        self._static = static
        self.history = History()
        self._stats = SharedPoll(engine.stats)
        self._lanes = SharedPoll(self._look_at_lanes)
        self._requests = SharedPoll(lambda: engine.live_requests(MOST_LISTED))

    async def lanes(self) -> list[LaneStatus]:
        return await self._lanes.get()

    async def set_mode(self, name: str, action: str) -> LaneStatus:
        """Set the mode of lane `name` for all gateways, from the engine's next step on, and return the lane's new
        status. `action` is pause, drain or resume.

        Raises:
            ApiError: INVALID_REQUEST, there is no such lane or the engine's scheduling policy has no lanes;
                ENGINE_UNAVAILABLE, the engine does not answer.
        """
        if name not in LANES:
            raise invalid_request(f"lane must be one of {', '.join(LANES)}", "lane")
        with _engine_answers():
            try:
                await self._engine.set_lane(LANES[name], MODES[action])
            except LaneRejected as error:
                raise invalid_request(str(error), "lane") from error
        self.forget()
        return next(status for status in await self.lanes() if status.lane == name)

    def engines(self) -> list[EngineOverview]:
        """Return the engines of the base model as this gateway sees them, also those that it cannot reach."""
        return [replace(overview, base_model=self.model) for overview in self._engine.overviews()]

    async def change_engine(self, name: str, action: str, seconds: float) -> EngineOverview:
        """Drain an engine, end its draining, or restart it, for all gateways, and return its new state.

        Args:
            name: name of the engine.
            action: one of ENGINE_ACTIONS.
            seconds: how long a restart waits for requests that no other engine can take over.

        Raises:
            ApiError: INVALID_REQUEST, there is no such engine; ENGINE_UNAVAILABLE, it does not answer.
        """
        known = [overview.name for overview in self._engine.overviews()]
        if name not in known:
            raise invalid_request(f"there is no engine {name!r}; there are {', '.join(known)}", "engine")
        with _engine_answers():
            await self._engine.drain(name, action != "resume", restart=action == "restart", seconds=seconds)
        self.forget()
        return next(overview for overview in self.engines() if overview.name == name)

    async def requests(self) -> LiveRequests:
        """Return the running requests, then the waiting ones, of the first MOST_LISTED live answers, and the number of
        all live answers. Raises ApiError: ENGINE_UNAVAILABLE, the engine does not answer."""
        with _engine_answers():
            live = await self._requests.get()
        return LiveRequests(_grouped(self.model, live.requests), live.total)

    async def answers(self) -> Sequence[pb.LiveRequest]:
        """Return all live answers. Raises ApiError: ENGINE_UNAVAILABLE, the engine does not answer."""
        with _engine_answers():
            return (await self._engine.live_requests(ALL)).requests

    async def cancel(self, answers: Sequence[pb.LiveRequest]) -> LiveRequest | None:
        """Cancel the answers of one request, and return its last state; None means that it has ended meanwhile. Raises
        ApiError: ENGINE_UNAVAILABLE, the engine does not answer."""
        with _engine_answers():
            ended = await self._engine.cancel([answer.request_id for answer in answers])
        self.forget()
        return _live_request(self.model, answers) if ended else None

    def forget(self) -> None:
        """Drop cached answers of the engine, so that the next query shows the current state."""
        for poll in (self._stats, self._lanes, self._requests):
            poll.forget()

    async def reserved(self) -> Mapping[str, int]:
        """Return, by tenant, the tokens that live requests have reserved of the tenant's limits and may still use.
        Raises ApiError: ENGINE_UNAVAILABLE, the engine does not answer."""
        with _engine_answers():
            return (await self._requests.get()).reserved_tokens

    async def engine(self) -> EngineStatus:
        with _engine_answers():
            stats = await self._stats.get()
        info, counted = self._engine.info, EngineStatus.__struct_fields__[4:]
        figures = {name: getattr(stats, name) for name in counted}
        rate = self.history.latest("tokens_per_second")
        return EngineStatus(self.model, info.model, info.device, rate, **figures)

    async def tenants(self) -> Mapping[str, tuple[int, int]]:
        """Return (running, waiting) by tenant: the numbers of live answers in the engine, over both lanes. Raises
        ApiError: ENGINE_UNAVAILABLE, the engine does not answer."""
        with _engine_answers():
            stats = await self._stats.get()
        found: dict[str, tuple[int, int]] = {}
        for tenant in stats.tenants:
            running, waiting = found.get(tenant.tenant, (0, 0))
            found[tenant.tenant] = running + tenant.running, waiting + tenant.waiting
        return found

    def latencies_at_goal(self) -> Mapping[str, float | None]:
        """Return recent TTFT and ITL of each lane in seconds, under keys such as `interactive.ttft_at_goal`, at a
        percentile: the lane's attainment goal, or `UNPROMISED` for a lane without one. None means that nothing was
        observed."""
        latency, goals = self._latency.read(), self._static.goals[self.model]
        return {
            f"{name}.{kind}_at_goal": latency.at(histogram, self.model, lane, goals[lane].attainment or UNPROMISED)
            for lane, name in LANE_NAMES.items()
            for kind, histogram in (("ttft", TTFT), ("itl", ITL))
        }

    async def _look_at_lanes(self) -> list[LaneStatus]:
        with _engine_answers():
            stats = await self._stats.get()
        latency = self._latency.read()
        goals = self._static.goals[self.model]
        return [_lane_status(self.model, lane, latency, goals[Lane(lane.lane)]) for lane in stats.lanes]


@contextmanager
def _engine_answers() -> Iterator[None]:
    try:
        yield
    except EngineUnavailable as error:
        raise unavailable(Fault.ENGINE_UNAVAILABLE, "the engine is not available") from error


def _lane_status(model: str, stats: pb.LaneStats, latency: Latency, goals: LaneGoals) -> LaneStatus:
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


def _grouped(model: str, answers: Sequence[pb.LiveRequest]) -> list[LiveRequest]:
    """Combine the answers of each request. Returns running requests first, then waiting ones, the oldest of each
    first."""
    by_id = sorted(answers, key=attrgetter("origin.id"))
    requests = [_live_request(model, list(group)) for _, group in groupby(by_id, key=attrgetter("origin.id"))]
    return sorted(requests, key=running_first)


def running_first(request: LiveRequest) -> tuple[bool, float]:
    """Sort key of live requests: the running ones, then the waiting ones, the oldest of each first."""
    return request.state == "queued", -request.age_seconds


def _live_request(base_model: str, answers: Sequence[pb.LiveRequest]) -> LiveRequest:
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
