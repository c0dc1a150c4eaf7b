"""What operators see and change of the lanes and live requests of one base model.

The data comes from the engine, which knows the requests of all gateway processes that share it and decides which ones
start. Only the percentiles come from the metrics of this gateway process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from msgspec.structs import replace

from engine.core.messages.requests import Lane, LaneMode
from engine.pb import engine_pb2 as pb
from engine.rpc.api import EngineApi
from engine.rpc.stream import EngineDrained, EngineUnavailable
from gateway.api_schema.engines import EngineOverview, EngineStatus
from gateway.api_schema.traffic import LaneStatus, LiveRequest, LiveRequests
from gateway.core.errors import Fault, invalid_request, unavailable
from gateway.core.lanes import LANE_NAMES
from gateway.core.shared_poll import SharedPoll
from gateway.engines.replica import EngineState
from gateway.observe.history import History
from gateway.observe.latency import ITL, TTFT, LatencyWindow
from gateway.observe.live import (
    LANES,
    grouped,
    lane_status,
    live_request,
)
from gateway.observe.static_metrics import StaticMetrics

ENGINE_ACTIONS = ("drain", "resume", "restart")
MODES: Mapping[str, LaneMode] = {"pause": LaneMode.PAUSED, "drain": LaneMode.DRAINING, "resume": LaneMode.OPEN}
UNPROMISED = 0.95
"""Percentile, as a share from 0 to 1, that charts show for a lane without an attainment goal."""
MOST_LISTED = 200
ALL = 2**32 - 1


class Engines(EngineApi, Protocol):
    """The engines of one base model, with the methods that operators' requests need; `EnginePool` has them."""

    def overviews(self) -> list[EngineOverview]: ...

    async def drain(self, name: str, draining: bool, *, restart: bool = False, seconds: float = 0.0) -> None: ...


class ModelOperations:
    """Shows the engine of one base model, its lanes, tenants and live requests, sets lane modes and cancels requests.
    Methods that ask the engine raise ApiError: ENGINE_UNAVAILABLE if it does not answer. Results are cached for one
    second for all callers, or until a change made here. `answers` and `cancel` bypass the cache."""

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
            ApiError: INVALID_REQUEST, there is no such lane; ENGINE_UNAVAILABLE, the engine does not answer.
        """
        if name not in LANES:
            raise invalid_request(f"lane must be one of {', '.join(LANES)}", "lane")
        with _engine_answers():
            await self._engine.set_lane(LANES[name], MODES[action])
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
            ApiError: INVALID_REQUEST, there is no such engine, or its drain cannot be ended;
                ENGINE_UNAVAILABLE, it does not answer.
        """
        self.engine_named(name)
        with _engine_answers():
            await self._engine.drain(name, action != "resume", restart=action == "restart", seconds=seconds)
        self.forget()
        others = (overview for overview in self.engines() if overview.name != name)
        is_missed = action != "resume" and not any(overview.state == EngineState.SERVING.value for overview in others)
        return replace(self.engine_named(name), notice=_missed(self.model, action) if is_missed else "")

    def engine_named(self, name: str) -> EngineOverview:
        """Return the engine of this name. Raises ApiError (INVALID_REQUEST), with all names, if there is none."""
        overviews = {overview.name: overview for overview in self.engines()}
        if name not in overviews:
            raise invalid_request(f"there is no engine {name!r}; there are {', '.join(overviews)}", "engine")
        return overviews[name]

    async def requests(self) -> LiveRequests:
        """Return the running requests, then the waiting ones, of the first MOST_LISTED live answers, and the number of
        all live answers. Raises ApiError: ENGINE_UNAVAILABLE, the engine does not answer."""
        with _engine_answers():
            live = await self._requests.get()
        return LiveRequests(grouped(self.model, live.requests), live.total)

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
        return live_request(self.model, answers) if ended else None

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
        counts: dict[str, tuple[int, int]] = {}
        for tenant in stats.tenants:
            running, waiting = counts.get(tenant.tenant, (0, 0))
            counts[tenant.tenant] = running + tenant.running, waiting + tenant.waiting
        return counts

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
        return [lane_status(self.model, lane, latency, goals[Lane(lane.lane)]) for lane in stats.lanes]


def _missed(model: str, action: str) -> str:
    """Return the notice for an operator who drains or restarts the only engine that serves a base model: what happens
    to new requests, and how to avoid that."""
    until = "its next process serves" if action == "restart" else "an engine serves again"
    wait = f"until {until}, new requests wait up to http.engine_wait_s and then fail with engine_unavailable"
    return f"no other engine serves {model}: {wait}; to avoid that, resume it and add an engine first"


@contextmanager
def _engine_answers() -> Iterator[None]:
    try:
        yield
    except EngineDrained as error:
        raise invalid_request(f"{error}; its drain cannot be ended", "engine") from error
    except EngineUnavailable as error:
        raise unavailable(Fault.ENGINE_UNAVAILABLE, "the engine is not available") from error
