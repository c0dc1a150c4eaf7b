"""What the gateway uses: the shared limiter, and a policy for when Redis is away."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gateway.core.errors import Fault, unavailable
from gateway.core.limits import Limits, Scope
from gateway.core.tenants import Tenant
from gateway.limiter.base import Grant, LimitEntry, Mode, Policy, ReserveRequest
from gateway.limiter.calls import StoreError
from gateway.limiter.local import LocalLimiter, unlimited
from gateway.limiter.redis import RedisLimiter
from gateway.limiter.usage import ScopeUsage

log = logging.getLogger(__name__)


class FailoverLimiter:
    """A `Limiter` that never fails because of Redis, except where its policy is to.

    degraded: each gateway limits by itself. closed: requests are refused with 503. open: requests are not limited.
    A grant is settled in the books it was written to, whatever the mode by then.
    """

    def __init__(self, shared: RedisLimiter, local: LocalLimiter, policy: Policy = "degraded") -> None:
        self._shared = shared
        self._local = local
        self._policy = policy
        self._reported: Mode = "redis"
        self._alone: set[str] = set()
        """Leases that Redis does not know."""

    @property
    def mode(self) -> Mode:
        return "redis" if self._shared.available else self._policy

    async def reserve(self, request: ReserveRequest) -> Grant:
        try:
            grant = await self._shared.reserve(request)
        except StoreError as error:
            self._report(str(error))
            return await self._reserve_alone(request)
        self._report("")
        self._local.adopt(grant)
        return grant

    async def settle(self, grant: Grant, actual_tokens: int) -> None:
        if grant.lease in self._alone:
            self._alone.remove(grant.lease)
            self._shared.count(grant)
        if grant.source == "redis":
            await self._shared.settle(grant, actual_tokens)
        elif grant.source == "local":
            await self._local.settle(grant, actual_tokens)

    async def refund(self, grant: Grant) -> None:
        self._alone.discard(grant.lease)
        if grant.source == "redis":
            await self._shared.refund(grant)
        elif grant.source == "local":
            await self._local.refund(grant)

    async def configure(self, tenants: Iterable[Tenant]) -> None:
        tenants = tuple(tenants)
        await self._local.configure(tenants)
        try:
            await self._shared.configure(tenants)
        except StoreError as error:
            self._report(str(error))

    def know(self, tenants: Iterable[Tenant]) -> None:
        tenants = tuple(tenants)
        self._local.know(tenants)
        self._shared.know(tenants)

    async def drop(self, tenant: str) -> None:
        with _changing():
            await self._shared.drop(tenant)
        await self._local.drop(tenant)

    @property
    def tenants(self) -> Sequence[str]:
        return self._local.tenants

    async def limits(self, scope: Scope) -> Limits:
        """What is in force: while Redis is away, the last known. The same holds for entries and usage."""
        try:
            return await self._shared.limits(scope)
        except StoreError:
            return await self._local.limits(scope)

    async def entries(self, tenant: str) -> Sequence[LimitEntry]:
        try:
            return await self._shared.entries(tenant)
        except StoreError:
            return await self._local.entries(tenant)

    async def usage(self, tenant: str) -> Sequence[ScopeUsage]:
        try:
            return await self._shared.usage(tenant)
        except StoreError:
            return await self._local.usage(tenant)

    async def set_limits(self, scope: Scope, changes: Mapping[str, Any]) -> Limits:
        """Raises ApiError LIMITER_UNAVAILABLE, as what follows: a change must reach every gateway or none."""
        with _changing():
            limits = await self._shared.set_limits(scope, changes)
        await self._local.set_limits(scope, limits.values())
        return limits

    async def restore_limits(self, scope: Scope) -> None:
        with _changing():
            await self._shared.restore_limits(scope)
        await self._local.restore_limits(scope)

    async def forget_use(self, scope: Scope) -> None:
        with _changing():
            await self._shared.forget_use(scope)
        await self._local.forget_use(scope)

    @property
    def undelivered_tokens(self) -> int:
        """Used by requests that were admitted without Redis, and not counted in it yet."""
        return self._shared.undelivered_tokens

    @property
    def lost_tokens(self) -> int:
        """Used, and never to be counted."""
        return self._shared.lost_tokens

    async def outstanding(self) -> int:
        """Raises StoreError: leases in Redis cannot be counted while it is away."""
        return await self._shared.outstanding() + await self._local.outstanding()

    async def ping(self) -> bool:
        return await self._shared.ping()

    async def close(self) -> None:
        await self._shared.close()
        await self._local.close()

    async def _reserve_alone(self, request: ReserveRequest) -> Grant:
        if self._policy == "closed":
            raise unavailable(Fault.LIMITER_UNAVAILABLE, "rate limits cannot be checked right now")
        grant = unlimited(request) if self._policy == "open" else await self._local.reserve(request)
        self._alone.add(grant.lease)
        return grant

    def _report(self, reason: str) -> None:
        """Logs changes of mode, not every request made in one."""
        if self.mode != self._reported:
            self._reported = self.mode
            log.warning("limiter mode is now %s %s", self.mode, f"({reason})" if reason else "")


@contextmanager
def _changing() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise unavailable(Fault.LIMITER_UNAVAILABLE, "limits cannot be changed while Redis is away") from error
