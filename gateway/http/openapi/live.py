"""The operations on lanes and live requests, and the console's files."""

from __future__ import annotations

from gateway.core.errors import Fault
from gateway.http import history
from gateway.http import operations as live
from gateway.http.console import CONSOLE, FILE
from gateway.http.openapi.operation import Operation, admin
from gateway.observe.history import MAX_MINUTES, HistoryPoints
from gateway.observe.recent import KEPT
from gateway.operations import LaneStatus, LiveRequests

ENGINE = frozenset({Fault.ENGINE_UNAVAILABLE})
LANE = ENGINE | {Fault.INVALID_REQUEST}
REQUEST = LANE | {Fault.REQUEST_NOT_FOUND}
SECTIONS = {"sections": {"type": "string", "examples": ["engine,lanes,requests,tenants,adapters"]}}

INVALID = frozenset({Fault.INVALID_REQUEST})
HISTORY_QUERY = {"minutes": {"type": "integer", "minimum": 1, "maximum": MAX_MINUTES}}
RECENT_QUERY = {
    "which": {"enum": list(history.WHICH), "description": "failed: those with a status of 400 or more, but not 499."},
    "limit": {"type": "integer", "minimum": 1, "maximum": KEPT},
}
SUMMARIES = {
    "pause": "Start nothing of it: what runs goes on, what comes waits.",
    "drain": "Take nothing new: what was taken goes on to its end.",
    "resume": "Serve it as ever.",
}

LIVE_OPERATIONS: tuple[Operation, ...] = (
    admin("GET", live.LANES, "All lanes: depth, waits, latencies, goals met.", live.LaneStatuses, ENGINE),
    *(
        admin("POST", f"{live.LANES}/{{lane}}/{action}", summary, LaneStatus, LANE)
        for action, summary in SUMMARIES.items()
    ),
    admin("GET", live.REQUESTS, "Live requests of every gateway process.", LiveRequests, ENGINE),
    admin("POST", live.REQUESTS + "/{id}/cancel", "End one.", live.CancelledRequest, REQUEST),
    admin("GET", live.OVERVIEW, "Several lists at once, for a console.", live.Overview, LANE, query=SECTIONS),
    admin("GET", history.HISTORY, "Figures of the last hours.", HistoryPoints, INVALID, query=HISTORY_QUERY),
    admin("GET", history.RECENT, "Requests that have ended.", history.RecentRequests, INVALID, query=RECENT_QUERY),
    Operation("GET", CONSOLE, "The console: a page without data.", "anyone", "text/html"),
    Operation("GET", FILE, "Its files.", "anyone", "*/*", faults=frozenset({Fault.ROUTE_NOT_FOUND})),
)
