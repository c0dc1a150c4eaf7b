"""The service loralane.v1.LimitAdmin, for administrators' keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import msgspec

from gateway.core.limits import LIMIT_NAMES, Limits, Scope
from gateway.limiter.admin import LimitAdmin, scope_of
from gateway.limiter.base import StoredLimits
from gateway.limiter.usage import ScopeUsage
from gateway.pb import limits_pb2 as pb
from gateway.pb import limits_pb2_grpc as pb_grpc
from gateway.rpc.calls import RpcCall, watch_interval


class LimitAdminService(pb_grpc.LimitAdminServicer):
    def __init__(self, limits: LimitAdmin) -> None:
        self._limits = limits
        self._closing = asyncio.Event()

    async def Get(self, request: pb.GetLimitsRequest, call: RpcCall) -> pb.GetLimitsResponse:  # noqa: N802
        return pb.GetLimitsResponse(entries=map(_entry_to_pb, await self._limits.get(request.tenant)))

    async def Set(self, request: pb.SetLimitsRequest, call: RpcCall) -> pb.LimitEntry:  # noqa: N802
        return _entry_to_pb(await self._limits.set(_scope(request.scope), _changes(request)))

    async def Reset(self, request: pb.ResetLimitsRequest, call: RpcCall) -> pb.ResetLimitsResponse:  # noqa: N802
        entry = await self._limits.reset(_scope(request.scope), used=request.used)
        return pb.ResetLimitsResponse(limits=_limits_to_pb(entry.limits), source=entry.source)

    async def Usage(self, request: pb.LimitUsageRequest, call: RpcCall) -> pb.LimitUsageResponse:  # noqa: N802
        return _usage_to_pb(await self._limits.usage(request.tenant))

    async def Watch(self, request: pb.WatchLimitsRequest, call: RpcCall) -> None:  # noqa: N802
        seconds = watch_interval(request.interval_seconds)
        async with aclosing(self._limits.watch(request.tenant, seconds, self._closing, call.check)) as changes:
            async for changed in changes:
                await call.open()
                await call.send(_usage_to_pb(changed))

    def stop_watching(self) -> None:
        """End every Watch call, which would otherwise last as long as its caller stays connected."""
        self._closing.set()


def _scope(scope: pb.LimitScope) -> Scope:
    return scope_of(scope.tenant, scope.key, scope.adapter)


def _changes(request: pb.SetLimitsRequest) -> dict[str, Any]:
    changes: dict[str, Any] = dict.fromkeys(request.lift)
    changes |= {name: getattr(request.limits, name) for name in LIMIT_NAMES if request.limits.HasField(name)}
    if request.set_shadow or request.limits.shadow:
        changes["shadow"] = list(request.limits.shadow)
    if request.set_when_redis_is_away or request.limits.when_redis_is_away:
        changes["when_redis_is_away"] = dict(request.limits.when_redis_is_away)
    return changes


def _limits_to_pb(limits: Limits) -> pb.Limits:
    return pb.Limits(**limits.set_values())


def _entry_to_pb(entry: StoredLimits) -> pb.LimitEntry:
    return pb.LimitEntry(
        scope=pb.LimitScope(**asdict(entry.scope)), limits=_limits_to_pb(entry.limits), source=entry.source
    )


def _usage_to_pb(usage: Sequence[ScopeUsage]) -> pb.LimitUsageResponse:
    return pb.LimitUsageResponse(
        scopes=[
            pb.ScopeUsage(
                scope=pb.LimitScope(**asdict(used.scope)),
                limits=[pb.LimitUsage(**msgspec.structs.asdict(limit)) for limit in used.limits],
                refused_at=used.refused_at,
                refused_by=used.refused_by,
            )
            for used in usage
        ]
    )
