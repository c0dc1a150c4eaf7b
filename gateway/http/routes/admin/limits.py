"""The HTTP API for limits, below /admin/v1/limits."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from gateway.api_schema import limits as api
from gateway.core.limits import Limits, Scope
from gateway.http.lists import tenant_filter
from gateway.http.routes.admin.from_rows import Answers
from gateway.limiter.admin import LimitAdmin, scope_of
from gateway.limiter.base import StoredLimits
from gateway.limiter.usage import ScopeUsage


class LimitsApi:
    """Handlers that read, change and reset limits. `AdminApi` lets only administrators reach them."""

    def __init__(self, limits: LimitAdmin) -> None:
        self._limits = limits

    def answers(self) -> Answers:
        return {api.LIST: self.get, api.SET: self.set, api.RESET: self.reset, api.USAGE: self.usage}

    async def get(self, request: Request) -> api.LimitEntries:
        return api.LimitEntries([_entry(entry) for entry in await self._limits.get(tenant_filter(request))])

    async def set(self, request: Request, body: api.SetBody) -> api.LimitEntry:
        fields = msgspec.structs.asdict(body)
        changes = {name: fields[name] for name in Limits.__slots__ if fields[name] is not UNSET}
        return _entry(await self._limits.set(_scope(body), changes))

    async def reset(self, request: Request, body: api.ResetBody) -> api.ScopeLimits:
        limits = await self._limits.reset(_scope(body), used=body.used)
        return api.ScopeLimits(**asdict(_scope(body)), **limits.values())

    async def usage(self, request: Request) -> api.LimitUses:
        return api.LimitUses([shown_use(used) for used in await self._limits.usage(tenant_filter(request))])


def _scope(body: api.ScopeBody) -> Scope:
    return scope_of(body.tenant, body.key, body.adapter)


def shown_use(used: ScopeUsage) -> api.ScopeUse:
    refused_by: list[str] = list(used.refused_by)
    scope = asdict(used.scope)
    return api.ScopeUse(**scope, limits=list(used.limits), refused_at=used.refused_at, refused_by=refused_by)


def _entry(entry: StoredLimits) -> api.LimitEntry:
    return api.LimitEntry(**asdict(entry.scope), **entry.limits.values(), source=entry.source)
