"""Calls about lanes, engines, gateways, live and recent requests, batches of all tenants, and readiness."""

from __future__ import annotations

from typing import Literal

from gateway.api_schema import batches as batches_api
from gateway.api_schema import engines as engines_api
from gateway.api_schema import gateways as gateways_api
from gateway.api_schema import status as status_api
from gateway.api_schema import traffic as api
from gateway.api_schema.batches import AdminBatch, Batch
from gateway.api_schema.common import Deleted
from gateway.api_schema.engines import EngineOverview
from gateway.api_schema.gateways import GatewayOverview
from gateway.api_schema.operation import Operation
from gateway.api_schema.status import Readiness
from gateway.api_schema.traffic import HistoryPoints, LaneStatus, LiveRequest, LiveRequests, Overview, RecentRequest
from gateway.client.call import Call
from gateway.core.lanes import LaneName


def lanes(model: str = "") -> Call[list[LaneStatus]]:
    """Return the lanes of all base models, or of `model`, with their queues, latencies and goals."""
    return Call.of(api.LIST_LANES, query={"model": model}, field="lanes")


def pause_lane(lane: LaneName, model: str = "") -> Call[LaneStatus]:
    """Pause a lane: running requests continue, and new ones wait."""
    return Call.of(api.PAUSE_LANE, lane, query={"model": model})


def drain_lane(lane: LaneName, model: str = "") -> Call[LaneStatus]:
    """Drain a lane: accepted requests are completed, and new ones are refused."""
    return Call.of(api.DRAIN_LANE, lane, query={"model": model})


def resume_lane(lane: LaneName, model: str = "") -> Call[LaneStatus]:
    """Resume a paused or drained lane."""
    return Call.of(api.RESUME_LANE, lane, query={"model": model})


def engines(model: str = "") -> Call[list[EngineOverview]]:
    """Return the engines of all base models, or of `model`."""
    return Call.of(engines_api.LIST, query={"model": model}, field="engines")


def add_engine(name: str, address: str, model: str = "", role: str = "") -> Call[EngineOverview]:
    """Add an engine for all gateways, also for those that start later. `role` is the part of split requests that it
    computes: prefill, decode or both, which is the default."""
    body = engines_api.NewEngineBody(name=name, address=address, model=model, role=role)
    return Call.of(engines_api.ADD, body=body)


def remove_engine(name: str, model: str = "") -> Call[Deleted]:
    """Remove an engine that was added: its requests move to other engines, and its process goes on."""
    return Call.of(engines_api.REMOVE, name, query={"model": model})


def drain_engine(name: str, model: str = "") -> Call[EngineOverview]:
    """Drain an engine: its requests move to other engines, and it gets no new ones."""
    return _engine(engines_api.DRAIN, name, model)


def resume_engine(name: str, model: str = "") -> Call[EngineOverview]:
    """Let a draining engine serve again."""
    return _engine(engines_api.RESUME, name, model)


def restart_engine(name: str, model: str = "", *, seconds: int | None = None) -> Call[EngineOverview]:
    """Drain an engine, then end its process, which is started again. Requests that cannot move to another engine have
    at most `seconds` to end before that."""
    return _engine(engines_api.RESTART, name, model, seconds)


def _engine(
    operation: Operation[EngineOverview], name: str, model: str, seconds: int | None = None
) -> Call[EngineOverview]:
    return Call.of(operation, name, query={"model": model, "seconds": seconds})


def gateways() -> Call[list[GatewayOverview]]:
    """Return the gateways that share one Redis."""
    return Call.of(gateways_api.LIST, field="gateways")


def drain_gateway(gateway: str, *, stop: bool = False) -> Call[GatewayOverview]:
    """Drain a gateway: it is not ready, hands its batches over, and gets no new requests. With `stop`, its process ends
    once nothing runs on it any more."""
    return Call.of(gateways_api.DRAIN, gateway, query={"stop": "true" if stop else None})


def live_requests(model: str = "") -> Call[LiveRequests]:
    """Return the live requests of all gateway processes."""
    return Call.of(api.LIST_REQUESTS, query={"model": model})


def cancel_request(request_id: str) -> Call[LiveRequest]:
    """Cancel a live request, and return it as it was when it was cancelled."""
    return Call.of(api.CANCEL_REQUEST, request_id, field="cancelled")


def recent_requests(which: Literal["all", "failed"] = "all", *, limit: int = 100) -> Call[list[RecentRequest]]:
    """Return requests that have ended, the newest first."""
    return Call.of(api.LIST_RECENT, query={"which": which, "limit": limit}, field="requests")


def history(minutes: int = 30, model: str = "") -> Call[HistoryPoints]:
    """Return the time series of the console's charts for the last `minutes`."""
    return Call.of(api.GET_HISTORY, query={"minutes": minutes, "model": model})


def overview(sections: str = "engine,lanes,requests,tenants,adapters", model: str = "") -> Call[Overview]:
    """Return several sections of the overview in one answer. `sections` names them, separated by commas; the fields of
    all others are UNSET."""
    return Call.of(api.GET_OVERVIEW, query={"sections": sections, "model": model})


def violations() -> Call[list[str]]:
    """Check that the engines' internal state is consistent, and return a message for each violation. An empty list
    means that there is none."""
    return Call.of(engines_api.CHECK, field="violations")


def readiness(model: str = "") -> Call[Readiness]:
    """Return whether requests can be served. Needs no key. A gateway that cannot serve raises ClientError (503)."""
    return Call.of(status_api.READY, query={"model": model})


def batch(batch_id: str) -> Call[Batch]:
    """Return one of the tenant's own batches, with its estimated end."""
    return Call.of(batches_api.GET, batch_id)


def batches(tenant: str = "", which: Literal["unfinished", "all"] = "unfinished") -> Call[list[AdminBatch]]:
    """Return batches of all tenants, or of one."""
    return Call.of(batches_api.LIST_ALL, query={"tenant": tenant, "which": which}, field="batches")


def cancel_batch(tenant: str, batch_id: str) -> Call[AdminBatch]:
    """Cancel a batch of any tenant."""
    return Call.of(batches_api.CANCEL_ANY, tenant, batch_id)
