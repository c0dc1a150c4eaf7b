"""The HTTP API for limits, below /admin/v1/limits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from gateway.core.limits import Limits, Scope
from gateway.http.edge import read_body
from gateway.http.lists import tenant_filter
from gateway.http.stream import json_response
from gateway.limiter.admin import LimitAdmin, scope_of
from gateway.limiter.base import StoredLimits
from gateway.limiter.usage import ScopeUsage
from gateway.openai.parse import parse

LIMITS = "/admin/v1/limits"

Change = int | None | UnsetType


class ScopeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """A scope of limits: a tenant, one of its keys or its use of one adapter; at most one of `key` and `adapter` may be
    set. Unknown fields are refused, so that a misspelling cannot leave a tenant without a limit."""

    tenant: str
    key: str = ""
    adapter: str = ""


class SetBody(ScopeBody, kw_only=True):
    """Body of PATCH /admin/v1/limits. Absent fields stay unchanged; null lifts a limit or sets default policies."""

    requests_per_minute: Change = UNSET
    tokens_per_minute: Change = UNSET
    concurrent_requests: Change = UNSET
    tokens_per_day: Change = UNSET
    shadow: list[str] | UnsetType = UNSET
    when_redis_is_away: dict[str, str] | UnsetType | None = UNSET


class ResetBody(ScopeBody, kw_only=True):
    """Body of POST /admin/v1/limits/reset, which restores the configured limits or, with `used`, sets the counted use
    to zero and keeps the limits."""

    used: bool = False


class LimitsApi:
    """Handlers that read, change and reset limits. `AdminApi` lets only administrators reach them."""

    def __init__(self, limits: LimitAdmin, max_body_bytes: int) -> None:
        self._limits = limits
        self._max_body_bytes = max_body_bytes

    async def get(self, request: Request) -> Response:
        entries = await self._limits.get(tenant_filter(request))
        return json_response({"limits": [entry_json(entry) for entry in entries]})

    async def set(self, request: Request) -> Response:
        body = parse(await read_body(request, self._max_body_bytes), SetBody)
        fields = msgspec.structs.asdict(body)
        changes = {name: fields[name] for name in Limits.__slots__ if fields[name] is not UNSET}
        return json_response(entry_json(await self._limits.set(_scope(body), changes)))

    async def reset(self, request: Request) -> Response:
        body = parse(await read_body(request, self._max_body_bytes), ResetBody)
        limits = await self._limits.reset(_scope(body), used=body.used)
        return json_response({**asdict(_scope(body)), **limits.values()})

    async def usage(self, request: Request) -> Response:
        scopes = await self._limits.usage(tenant_filter(request))
        return json_response({"usage": [use_json(used) for used in scopes]})


def _scope(body: ScopeBody) -> Scope:
    return scope_of(body.tenant, body.key, body.adapter)


def use_json(used: ScopeUsage) -> dict[str, Any]:
    last = {"refused_at": used.refused_at, "refused_by": used.refused_by}
    return {**asdict(used.scope), "limits": used.limits, **last}


def entry_json(entry: StoredLimits) -> dict[str, Any]:
    return {**asdict(entry.scope), **entry.limits.values(), "source": entry.source}
