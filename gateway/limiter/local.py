"""Limits of this process alone: the same arithmetic in memory, for when Redis is away."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable

from gateway.core.budget import Bucket, Charge, charges, reserve, settle
from gateway.core.tenants import Limits, Tenant
from gateway.limiter.base import Grant, Mode, ReserveRequest, refused

Scope = tuple[str, str | None]
"""Tenant, and one of its keys or None for all of it."""


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


class LocalLimiter:
    """Grants each of `replicas` gateways an equal share of every limit. A `Limiter`."""

    mode: Mode = "degraded"

    def __init__(self, replicas: int = 1, clock: Callable[[], int] = monotonic_us) -> None:
        """`clock`: microseconds."""
        self._replicas = replicas
        self._clock = clock
        self._tenants: dict[str, Tenant] = {}
        self._live: dict[Scope, Limits] = {}
        self._buckets: dict[Scope, Bucket] = {}
        self._leases: dict[str, tuple[Charge, ...]] = {}

    async def reserve(self, request: ReserveRequest) -> Grant:
        """Raises ApiError (429)."""
        scopes = _scopes(request)
        admitted, buckets = reserve([self._bucket(scope) for scope in scopes], request.tokens, self._clock())
        if not admitted:
            raise refused(request, buckets)
        grant = Grant(f"{request.request_id}.{secrets.token_hex(6)}", request, "local", buckets)
        self._buckets.update(zip(scopes, buckets, strict=True))
        self._leases[grant.lease] = charges(buckets, request.tokens)
        return grant

    async def settle(self, grant: Grant, actual_tokens: int) -> None:
        self._correct(grant, 1, actual_tokens)

    async def refund(self, grant: Grant) -> None:
        self._correct(grant, 0, 0)

    async def configure(self, tenants: Iterable[Tenant]) -> None:
        self._tenants = {tenant.name: tenant for tenant in tenants}

    async def limits(self, tenant: str, key_id: str | None = None) -> Limits:
        return self._limits((tenant, key_id))

    async def set_limits(self, tenant: str, limits: Limits | None, key_id: str | None = None) -> None:
        if limits is None:
            self._live.pop((tenant, key_id), None)
        else:
            self._live[tenant, key_id] = limits

    def adopt(self, grant: Grant) -> None:
        """Learns from a grant of the shared limiter which limits are in force."""
        for scope, bucket in zip(_scopes(grant.request), grant.buckets, strict=True):
            self._live[scope] = Limits(bucket.requests.limit, bucket.tokens.limit)

    async def outstanding(self) -> int:
        return len(self._leases)

    async def ping(self) -> bool:
        return True

    async def close(self) -> None:
        self._leases.clear()

    def _limits(self, scope: Scope) -> Limits:
        tenant = self._tenants.get(scope[0], Tenant(scope[0]))
        return self._live.get(scope, tenant.limits if scope[1] is None else tenant.key_limits)

    def _bucket(self, scope: Scope) -> Bucket:
        limits = self._limits(scope).divided(self._replicas)
        return self._buckets.get(scope, Bucket.empty(limits)).limited(limits)

    def _correct(self, grant: Grant, requests: int, tokens: int) -> None:
        now = self._clock()
        for scope, charge in zip(_scopes(grant.request), self._leases.pop(grant.lease, ()), strict=False):
            self._buckets[scope] = settle(self._bucket(scope), charge, requests, tokens, now)


def _scopes(request: ReserveRequest) -> tuple[Scope, Scope]:
    return (request.tenant, None), (request.tenant, request.key_id)
