"""Calls about lanes, engines, live and recent requests, batches of all tenants, and the state of a gateway."""

from __future__ import annotations

from typing import Literal

from gateway.client.call import Call
from gateway.client.paths import path_part
from gateway.engines.replica import EngineOverview
from gateway.http.admin_answers import Deleted
from gateway.http.admin_batches import ADMIN_BATCHES
from gateway.http.batches import BATCHES
from gateway.http.openapi.answers import Readiness, Violations
from gateway.http.openapi.batches import AdminBatch, AdminBatches, Batch
from gateway.http.operations import (
    ENGINES,
    HISTORY,
    LANES,
    OVERVIEW,
    RECENT,
    REQUESTS,
    CancelledRequest,
    EngineOverviews,
    LaneStatuses,
    NewEngineBody,
    Overview,
    RecentRequests,
)
from gateway.observe.history import HistoryPoints
from gateway.observe.live import LaneStatus, LiveRequest, LiveRequests
from gateway.observe.recent import RecentRequest

LaneName = Literal["interactive", "batch"]


def lanes(model: str = "") -> Call[list[LaneStatus]]:
    """Return the lanes of all base models, or of `model`, with their queues, latencies and goals."""
    return Call("GET", LANES, LaneStatuses, {"model": model}, field="lanes")


def pause_lane(lane: LaneName, model: str = "") -> Call[LaneStatus]:
    """Pause a lane: running requests continue, and new ones wait."""
    return _lane(lane, "pause", model)


def drain_lane(lane: LaneName, model: str = "") -> Call[LaneStatus]:
    """Drain a lane: accepted requests are completed, and new ones are refused."""
    return _lane(lane, "drain", model)


def resume_lane(lane: LaneName, model: str = "") -> Call[LaneStatus]:
    """Resume a paused or drained lane."""
    return _lane(lane, "resume", model)


def _lane(lane: str, action: str, model: str) -> Call[LaneStatus]:
    return Call("POST", f"{LANES}/{lane}/{action}", LaneStatus, {"model": model})


def engines(model: str = "") -> Call[list[EngineOverview]]:
    """Return the engines of all base models, or of `model`."""
    return Call("GET", ENGINES, EngineOverviews, {"model": model}, field="engines")


def add_engine(name: str, address: str, model: str = "", role: str = "") -> Call[EngineOverview]:
    """Add an engine for all gateways, also for those that start later. `role` is the part of split requests that it
    computes: prefill, decode or both, which is the default."""
    return Call("POST", ENGINES, EngineOverview, body=NewEngineBody(name=name, address=address, model=model, role=role))


def remove_engine(name: str, model: str = "") -> Call[Deleted]:
    """Remove an engine that was added: its requests move to other engines, and its process goes on."""
    return Call("DELETE", f"{ENGINES}/{path_part(name)}", Deleted, {"model": model})


def drain_engine(name: str, model: str = "") -> Call[EngineOverview]:
    """Drain an engine: its requests move to other engines, and it gets no new ones."""
    return _engine(name, "drain", model)


def resume_engine(name: str, model: str = "") -> Call[EngineOverview]:
    """Let a draining engine serve again."""
    return _engine(name, "resume", model)


def restart_engine(name: str, model: str = "", *, seconds: int | None = None) -> Call[EngineOverview]:
    """Drain an engine, then end its process, which is started again. Requests that cannot move to another engine have
    at most `seconds` to end before that."""
    return _engine(name, "restart", model, seconds)


def _engine(name: str, action: str, model: str, seconds: int | None = None) -> Call[EngineOverview]:
    query = {"model": model, "seconds": seconds}
    return Call("POST", f"{ENGINES}/{path_part(name)}/{action}", EngineOverview, query)


def live_requests(model: str = "") -> Call[LiveRequests]:
    """Return the live requests of all gateway processes."""
    return Call("GET", REQUESTS, LiveRequests, {"model": model})


def cancel_request(request_id: str) -> Call[LiveRequest]:
    """Cancel a live request, and return it as it was when it was cancelled."""
    return Call("POST", f"{REQUESTS}/{path_part(request_id)}/cancel", CancelledRequest, field="cancelled")


def recent_requests(which: Literal["all", "failed"] = "all", *, limit: int = 100) -> Call[list[RecentRequest]]:
    """Return requests that have ended, the newest first."""
    return Call("GET", RECENT, RecentRequests, {"which": which, "limit": limit}, field="requests")


def history(minutes: int = 30, model: str = "") -> Call[HistoryPoints]:
    """Return the time series of the console's charts for the last `minutes`."""
    return Call("GET", HISTORY, HistoryPoints, {"minutes": minutes, "model": model})


def overview(sections: str = "engine,lanes,requests,tenants,adapters", model: str = "") -> Call[Overview]:
    """Return several sections of the overview in one answer. `sections` names them, separated by commas; the fields of
    all others are UNSET."""
    return Call("GET", OVERVIEW, Overview, {"sections": sections, "model": model})


def violations() -> Call[list[str]]:
    """Check that the engines' internal state is consistent, and return a message for each violation. An empty list
    means that there is none."""
    return Call("GET", "/admin/v1/check", Violations, field="violations")


def readiness(model: str = "") -> Call[Readiness]:
    """Return whether requests can be served. Needs no key. A gateway that cannot serve raises ClientError (503)."""
    return Call("GET", "/ready", Readiness, {"model": model})


def batch(batch_id: str) -> Call[Batch]:
    """Return one of the tenant's own batches, with its estimated end."""
    return Call("GET", f"{BATCHES}/{path_part(batch_id)}", Batch)


def batches(tenant: str = "", which: Literal["unfinished", "all"] = "unfinished") -> Call[list[AdminBatch]]:
    """Return batches of all tenants, or of one."""
    return Call("GET", ADMIN_BATCHES, AdminBatches, {"tenant": tenant, "which": which}, field="batches")


def cancel_batch(tenant: str, batch_id: str) -> Call[AdminBatch]:
    """Cancel a batch of any tenant."""
    return Call("POST", f"{ADMIN_BATCHES}/{path_part(tenant)}/{path_part(batch_id)}/cancel", AdminBatch)
