"""The HTTP API for the console's charts and lists: figures of the last hours and recent requests. Only administrators
can call it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, cast

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from gateway.core.errors import invalid_request
from gateway.http.lists import check_parameters, number_from
from gateway.http.stream import json_response
from gateway.observe.history import MAX_MINUTES
from gateway.observe.recent import KEPT, RecentRequest
from gateway.operations import Operations

HISTORY = "/admin/v1/history"
RECENT = "/admin/v1/requests/recent"
DEFAULT_MINUTES, DEFAULT_RECENT = 30, 100
WHICH = ("all", "failed")

Row = tuple[str, str, Callable[[Request], Awaitable[Response]]]


class RecentRequests(Struct):
    """Recent requests of the gateway process that answers, the newest first."""

    requests: list[RecentRequest]


class HistoryApi:
    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def table(self) -> list[Row]:
        """Return the method, path and handler of each route."""
        return [("GET", HISTORY, self.history), ("GET", RECENT, self.recent)]

    async def history(self, request: Request) -> Response:
        given = request.query_params
        check_parameters(given, "minutes")
        minutes = number_from(given.get("minutes", str(DEFAULT_MINUTES)), "minutes", 1, MAX_MINUTES)
        return json_response(self._operations.history.read(minutes))

    async def recent(self, request: Request) -> Response:
        given = request.query_params
        check_parameters(given, "which", "limit")
        which = given.get("which", WHICH[0])
        if which not in WHICH:
            raise invalid_request(f"which must be one of {', '.join(WHICH)}", "which")
        limit = number_from(given.get("limit", str(DEFAULT_RECENT)), "limit", 1, KEPT)
        found = self._operations.recent.read(cast(Literal["all", "failed"], which), limit)
        return json_response({"requests": found})
