"""Lanes, live and recent requests, history and the overview: what operators get, and the operations."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.api_schema.adapters import AdapterStatus
from gateway.api_schema.common import INVALID, ONE_MODEL
from gateway.api_schema.engines import EngineStatus
from gateway.api_schema.limits import TenantUse
from gateway.api_schema.operation import Operation, admin
from gateway.core.errors import Fault
from gateway.core.lanes import LaneName

LANES = "/admin/v1/lanes"
REQUESTS = "/admin/v1/requests"
MAX_MINUTES = 1440
KEPT = 500
"""Number of ended requests, and of failed ones, that a gateway process remembers."""
WHICH = ("all", "failed")


class Percentiles(Struct, frozen=True):
    """Percentiles in seconds of `count` observations, interpolated between a histogram's bounds; null if there are
    none."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    count: int = 0


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


class LaneStatuses(Struct):
    lanes: list[LaneStatus]


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


class CancelledRequest(Struct):
    """Response to a cancellation: the request as it was when it was cancelled."""

    cancelled: LiveRequest


class RecentRequest(Struct, frozen=True):
    """A request that has ended. Times are in seconds; null means that the request did not get that far."""

    id: str
    request_id: str
    """The caller's own id, which may not be unique."""
    tenant: str
    """Empty if the caller was refused before its key was known."""
    key: str
    """The short id of the key."""
    model: str
    lane: str
    """Empty if the request was refused before it had a lane."""
    status: int
    """The HTTP status of the answer; 499 means that the client left."""
    failed: bool
    """True means that it counts as a failure: a status of 400 or more, but not 499."""
    code: str
    """The error code of the answer; empty if the request succeeded."""
    finish: str
    prompt_tokens: int
    completion_tokens: int
    ended: float
    """When the request ended, in Unix seconds."""
    duration_seconds: float | None
    ttft_seconds: float | None
    tpot_seconds: float | None


class RecentRequests(Struct):
    """Recent requests of the gateway process that answers, the newest first."""

    requests: list[RecentRequest]


class HistoryPoints(Struct, frozen=True):
    """Figures over time, one list for each, the oldest value first. Points are `step_seconds` apart, except at gaps."""

    step_seconds: float
    """Expected time between two points. A longer one is a gap: the engine was unavailable, or the gateway stalled."""
    times: list[float]
    """Unix seconds of each point."""
    series: dict[str, list[float | None]]
    """Values by figure, as many as `times`; null where the figure was unknown."""


class Overview(Struct):
    """Response of the overview. Sections that were not requested are absent."""

    models: list[str] | UnsetType = UNSET
    """Names of the base models, the default one first."""
    engine: EngineStatus | UnsetType = UNSET
    lanes: list[LaneStatus] | UnsetType = UNSET
    requests: LiveRequests | UnsetType = UNSET
    tenants: list[TenantUse] | UnsetType = UNSET
    adapters: list[AdapterStatus] | UnsetType = UNSET


ENGINE = INVALID | {Fault.ENGINE_UNAVAILABLE}
HISTORY_QUERY = {"minutes": {"type": "integer", "minimum": 1, "maximum": MAX_MINUTES}, **ONE_MODEL}
RECENT_QUERY = {
    "which": {"enum": list(WHICH), "description": "failed: status 400 or above, except 499."},
    "limit": {"type": "integer", "minimum": 1, "maximum": KEPT},
}
SECTIONS = {"sections": {"type": "string", "examples": ["engine,lanes,requests,tenants,adapters"]}, **ONE_MODEL}


def _set(action: str, summary: str) -> Operation[LaneStatus]:
    return admin("POST", f"{LANES}/{{lane}}/{action}", summary, LaneStatus, ENGINE, query=ONE_MODEL)


LIST_LANES = admin("GET", LANES, "List lanes with queues, latencies and goals.", LaneStatuses, ENGINE, query=ONE_MODEL)
PAUSE_LANE = _set("pause", "Pause a lane: running requests continue, and new ones wait.")
DRAIN_LANE = _set("drain", "Drain a lane: accepted requests are completed, and new ones are refused.")
RESUME_LANE = _set("resume", "Resume a paused or drained lane.")
LIST_REQUESTS = admin(
    "GET", REQUESTS, "List live requests of all gateway processes.", LiveRequests, ENGINE, query=ONE_MODEL
)
CANCEL_REQUEST = admin(
    "POST", REQUESTS + "/{id}/cancel", "Cancel a live request.", CancelledRequest, ENGINE | {Fault.REQUEST_NOT_FOUND}
)
GET_OVERVIEW = admin(
    "GET", "/admin/v1/overview", "Get several sections of the overview.", Overview, ENGINE, query=SECTIONS
)
GET_HISTORY = admin(
    "GET", "/admin/v1/history", "Get key figures over time.", HistoryPoints, INVALID, query=HISTORY_QUERY
)
LIST_RECENT = admin(
    "GET", REQUESTS + "/recent", "List recently ended requests.", RecentRequests, INVALID, query=RECENT_QUERY
)

OPERATIONS: tuple[Operation[Any], ...] = (
    LIST_LANES,
    PAUSE_LANE,
    DRAIN_LANE,
    RESUME_LANE,
    LIST_REQUESTS,
    CANCEL_REQUEST,
    GET_OVERVIEW,
    GET_HISTORY,
    LIST_RECENT,
)
