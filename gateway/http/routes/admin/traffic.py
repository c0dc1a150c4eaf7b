"""The HTTP API for lanes, live and recent requests, history, and the console's overview, below /admin/v1."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.adapters.admin import AdapterAdmin
from gateway.api_schema import traffic as api
from gateway.api_schema.limits import TenantUse
from gateway.core.errors import invalid_request
from gateway.core.shared_poll import SharedPoll
from gateway.http.lists import model_filter, parse_number
from gateway.http.routes.admin.from_rows import Answering, Answers
from gateway.http.routes.admin.limits import shown_use
from gateway.http.stream import json_response
from gateway.limiter.admin import LimitAdmin
from gateway.observe.operations import Operations
from gateway.usage.report import UsageAdmin

USAGE_SECONDS = 5.0
"""Minimum seconds between two reads of tenants' recent usage for the overview. Each read searches the usage books' keys
of two days."""
DEFAULT_MINUTES, DEFAULT_RECENT = 30, 100


class TrafficApi:
    """Handlers of the operations on lanes, requests and history. `AdminApi` lets only administrators reach them."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def answers(self) -> Answers:
        return {
            api.LIST_LANES: self.lanes,
            api.PAUSE_LANE: self._set("pause"),
            api.DRAIN_LANE: self._set("drain"),
            api.RESUME_LANE: self._set("resume"),
            api.LIST_REQUESTS: self.requests,
            api.CANCEL_REQUEST: self.cancel,
            api.GET_HISTORY: self.history,
            api.LIST_RECENT: self.recent,
        }

    async def lanes(self, request: Request) -> api.LaneStatuses:
        """Return the status of the lanes of all base models, or of the one that the query parameter `model` names."""
        return api.LaneStatuses(await self._operations.lanes(model_filter(request)))

    async def requests(self, request: Request) -> api.LiveRequests:
        """Return the live requests of all base models, or of the one that the query parameter `model` names."""
        return await self._operations.requests(model_filter(request))

    async def cancel(self, request: Request) -> api.CancelledRequest:
        return api.CancelledRequest(await self._operations.cancel(request.path_params["id"]))

    async def history(self, request: Request) -> api.HistoryPoints:
        given = request.query_params
        minutes = parse_number(given.get("minutes", str(DEFAULT_MINUTES)), "minutes", 1, api.MAX_MINUTES)
        return self._operations.of(model_filter(request)).history.read(minutes)

    async def recent(self, request: Request) -> api.RecentRequests:
        given = request.query_params
        which = given.get("which", api.WHICH[0])
        if which not in api.WHICH:
            raise invalid_request(f"which must be one of {', '.join(api.WHICH)}", "which")
        limit = parse_number(given.get("limit", str(DEFAULT_RECENT)), "limit", 1, api.KEPT)
        return api.RecentRequests(self._operations.recent.read(cast(Literal["all", "failed"], which), limit))

    def _set(self, action: str) -> Answering:
        async def change(request: Request) -> api.LaneStatus:
            return await self._operations.set_mode(request.path_params["lane"], action, model_filter(request))

        return change


class OverviewApi:
    """Handler of the overview, whose sections are cached for about a second. `AdminApi` lets only administrators reach
    it."""

    def __init__(self, operations: Operations, limits: LimitAdmin, adapters: AdapterAdmin, usage: UsageAdmin) -> None:
        self._operations = operations
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

    def answers(self) -> Answers:
        return {api.GET_OVERVIEW: self.overview}

    async def overview(self, request: Request) -> Response:
        """Return several sections in one response, in the order in which they were asked for, so that the console needs
        one request for each refresh.

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
        found = await asyncio.gather(*[self._sections[name](model_filter(request)) for name in names])
        return json_response(dict(zip(names, found, strict=True)))

    def forget(self) -> None:
        """Drop the cached sections, except tenants' settled use, and the cached answers of the engine, so that the next
        request sees a change."""
        for poll in (self._tenants, self._adapters):
            poll.forget()
        self._operations.forget()

    async def _names(self, model: str) -> list[str]:
        return [one.model for one in self._operations]

    async def _look_at_tenants(self) -> Sequence[TenantUse]:
        busy, reserved = await self._operations.tenants(), await self._operations.reserved()
        usage, spent = await self._limits.usage(), await self._used.get()
        return [
            TenantUse(
                **msgspec.structs.asdict(shown_use(used)),
                used=spent.get(used.scope.tenant),
                running=busy.get(used.scope.tenant, (0, 0))[0],
                waiting=busy.get(used.scope.tenant, (0, 0))[1],
                reserved_tokens=reserved.get(used.scope.tenant, 0),
            )
            for used in usage
            if used.scope.kind == "tenant"
        ]
