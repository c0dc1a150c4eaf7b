"""The HTTP API for engines, lanes, live and recent requests, history, and the console's overview, below /admin/v1."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, cast

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from gateway.adapters.admin import AdapterAdmin
from gateway.adapters.status import AdapterStatus
from gateway.core.errors import invalid_request
from gateway.core.shared_poll import SharedPoll
from gateway.engines.replica import EngineOverview
from gateway.http.admin_answers import TenantUse
from gateway.http.edge import RouteEntry, read_body
from gateway.http.limits import use_json
from gateway.http.lists import parse_number
from gateway.http.stream import json_response
from gateway.limiter.admin import LimitAdmin
from gateway.observe.history import MAX_MINUTES
from gateway.observe.live import EngineStatus, LaneStatus, LiveRequest, LiveRequests
from gateway.observe.model_operations import ENGINE_ACTIONS, MAX_RESTART_SECONDS, MODES, RESTART_SECONDS
from gateway.observe.operations import Operations
from gateway.observe.recent import KEPT, RecentRequest
from gateway.openai.parse import parse
from gateway.usage.report import UsageAdmin

LANES = "/admin/v1/lanes"
ENGINES = "/admin/v1/engines"
ENGINE = ENGINES + "/{engine}"
REQUESTS = "/admin/v1/requests"
OVERVIEW = "/admin/v1/overview"
USAGE_SECONDS = 5.0
"""Minimum seconds between two reads of tenants' recent usage for the overview. Each read searches the usage books' keys
of two days."""


class NewEngineBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /admin/v1/engines, which adds an engine for all gateways. `model` names the base model that it
    serves, and may be left out if there is one."""

    name: str
    address: str
    model: str = ""
    role: str = ""
    """The part of split requests that the engine computes: prefill, decode or both, which is the default."""


class EngineOverviews(Struct):
    engines: list[EngineOverview]


class LaneStatuses(Struct):
    lanes: list[LaneStatus]


class CancelledRequest(Struct):
    """Response to a cancellation: the request as it was when it was cancelled."""

    cancelled: LiveRequest


class Overview(Struct):
    """Response of the overview. Sections that were not requested are absent."""

    models: list[str] | UnsetType = UNSET
    """Names of the base models, the default one first."""
    engine: EngineStatus | UnsetType = UNSET
    lanes: list[LaneStatus] | UnsetType = UNSET
    requests: LiveRequests | UnsetType = UNSET
    tenants: list[TenantUse] | UnsetType = UNSET
    adapters: list[AdapterStatus] | UnsetType = UNSET


class OperationsApi:
    """Handlers for engines, lanes, live requests and the overview. `AdminApi` lets only administrators reach them. The
    overview's sections are cached for about a second."""

    def __init__(
        self,
        operations: Operations,
        limits: LimitAdmin,
        adapters: AdapterAdmin,
        usage: UsageAdmin,
        max_body_bytes: int,
    ) -> None:
        self._operations = operations
        self._max_body_bytes = max_body_bytes
        self._limits = limits
        self._used = SharedPoll(usage.last_minute.read, USAGE_SECONDS)
        self._tenants, self._adapters = SharedPoll(self._look_at_tenants), SharedPoll(adapters.statuses)
        self._sections: dict[str, Callable[[str], Awaitable[Any]]] = {
            "models": self._names,
            "engine": operations.engine,
            "lanes": operations.lanes,
            "requests": operations.requests,
            "tenants": lambda model: self._tenants.get(),
            "adapters": lambda model: self._adapters.get(),
        }

    def table(self) -> list[RouteEntry]:
        """Return (method, path, handler) for each route; `AdminApi` makes the routes from them."""
        changes: list[RouteEntry] = [("POST", f"{LANES}/{{lane}}/{action}", self._change(action)) for action in MODES]
        changes += [("POST", f"{ENGINE}/{action}", self._change_engine(action)) for action in ENGINE_ACTIONS]
        return [
            ("GET", ENGINES, self.engines),
            ("POST", ENGINES, self.add_engine),
            ("DELETE", ENGINE, self.remove_engine),
            ("GET", LANES, self.lanes),
            *changes,
            ("GET", REQUESTS, self.requests),
            ("POST", REQUESTS + "/{id}/cancel", self.cancel),
            ("GET", OVERVIEW, self.overview),
        ]

    async def engines(self, request: Request) -> Response:
        """Return the engines of all base models, or of the one that the query parameter `model` names."""
        return json_response({"engines": self._operations.engines(_model(request))})

    async def add_engine(self, request: Request) -> Response:
        body = parse(await read_body(request, self._max_body_bytes), NewEngineBody)
        return json_response(await self._operations.add_engine(body.name, body.address, body.model, body.role), 201)

    async def remove_engine(self, request: Request) -> Response:
        await self._operations.remove_engine(request.path_params["engine"], _model(request))
        return json_response({"deleted": True})

    async def lanes(self, request: Request) -> Response:
        """Return the status of the lanes of all base models, or of the one that the query parameter `model` names."""
        return json_response({"lanes": await self._operations.lanes(_model(request))})

    async def requests(self, request: Request) -> Response:
        """Return the live requests of all base models, or of the one that the query parameter `model` names."""
        return json_response(await self._operations.requests(_model(request)))

    async def cancel(self, request: Request) -> Response:
        return json_response({"cancelled": await self._operations.cancel(request.path_params["id"])})

    async def overview(self, request: Request) -> Response:
        """Return several sections as JSON in one response, so that the console needs one request for each refresh.

        The query parameter `sections` names the sections, separated by commas; without it, all are returned. With the
        parameter `model`, the engine, lanes and requests are those of that base model; without it, the engine is that
        of the first whose engine answers.

        Raises ApiError: INVALID_REQUEST for an unknown section or base model; ENGINE_UNAVAILABLE or, for tenants' use,
        LIMITER_UNAVAILABLE.
        """
        asked = request.query_params.get("sections")
        names = list(self._sections) if asked is None else asked.split(",")
        unknown = [name for name in names if name not in self._sections]
        if unknown:
            known = ", ".join(self._sections)
            raise invalid_request(f"sections: {unknown[0]!r} is none of {known}", "sections")
        found = await asyncio.gather(*[self._sections[name](_model(request)) for name in names])
        return json_response(dict(zip(names, found, strict=True)))

    def forget(self) -> None:
        """Drop the cached sections, except tenants' settled use, and the cached answers of the engine, so that the next
        request sees a change."""
        for poll in (self._tenants, self._adapters):
            poll.forget()
        self._operations.forget()

    async def _names(self, model: str) -> list[str]:
        return [one.model for one in self._operations]

    def _change(self, action: str) -> Callable[[Request], Awaitable[Response]]:
        async def change(request: Request) -> Response:
            lane = request.path_params["lane"]
            return json_response(await self._operations.set_mode(lane, action, _model(request)))

        return change

    def _change_engine(self, action: str) -> Callable[[Request], Awaitable[Response]]:
        async def change(request: Request) -> Response:
            given = request.query_params.get("seconds")
            seconds = RESTART_SECONDS if given is None else parse_number(given, "seconds", 0, MAX_RESTART_SECONDS)
            name = request.path_params["engine"]
            return json_response(await self._operations.change_engine(name, action, _model(request), seconds))

        return change

    async def _look_at_tenants(self) -> Sequence[dict[str, Any]]:
        busy, reserved = await self._operations.tenants(), await self._operations.reserved()
        usage, spent = await self._limits.usage(), await self._used.get()
        return [
            {
                **use_json(used),
                "used": spent.get(used.scope.tenant),
                "running": busy.get(used.scope.tenant, (0, 0))[0],
                "waiting": busy.get(used.scope.tenant, (0, 0))[1],
                "reserved_tokens": reserved.get(used.scope.tenant, 0),
            }
            for used in usage
            if used.scope.kind == "tenant"
        ]


HISTORY = "/admin/v1/history"
RECENT = "/admin/v1/requests/recent"
DEFAULT_MINUTES, DEFAULT_RECENT = 30, 100
WHICH = ("all", "failed")


class RecentRequests(Struct):
    """Recent requests of the gateway process that answers, the newest first."""

    requests: list[RecentRequest]


class HistoryApi:
    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def table(self) -> list[RouteEntry]:
        """Return (method, path, handler) for each route; `AdminApi` makes the routes from them."""
        return [("GET", HISTORY, self.history), ("GET", RECENT, self.recent)]

    async def history(self, request: Request) -> Response:
        given = request.query_params
        minutes = parse_number(given.get("minutes", str(DEFAULT_MINUTES)), "minutes", 1, MAX_MINUTES)
        return json_response(self._operations.of(_model(request)).history.read(minutes))

    async def recent(self, request: Request) -> Response:
        given = request.query_params
        which = given.get("which", WHICH[0])
        if which not in WHICH:
            raise invalid_request(f"which must be one of {', '.join(WHICH)}", "which")
        limit = parse_number(given.get("limit", str(DEFAULT_RECENT)), "limit", 1, KEPT)
        found = self._operations.recent.read(cast(Literal["all", "failed"], which), limit)
        return json_response({"requests": found})


def _model(request: Request) -> str:
    """Return the base model that the query parameter `model` names; empty if it is absent."""
    return request.query_params.get("model", "")
