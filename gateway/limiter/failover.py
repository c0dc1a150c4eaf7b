"""What the gateway uses: the shared limiter, and a policy for when Redis is away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import structlog
from msgspec.structs import replace

from gateway.core.errors import ApiError, Fault, unavailable
from gateway.core.limits import Limits, Policy, Scope
from gateway.core.tenants import Tenant
from gateway.limiter.base import MODE_HEADER, Grant, LimitEntry, Mode, ReserveRequest
from gateway.limiter.calls import StoreError
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter
from gateway.limiter.room import Room
from gateway.limiter.usage import ScopeUsage

log = structlog.get_logger("limiter")


class FailoverLimiter:
    """A `Limiter` that never fails because of Redis, except where a limit's policy is to.

    degraded: each gateway keeps to its share. closed: whom it limits is refused with 503. open: it limits nobody. Each
    limit may say which; the local limiter knows what holds for the others. A grant is settled in the books it was
    written to, whatever the mode by then.
    """

    def __init__(self, shared: RedisLimiter, local: LocalLimiter) -> None:
        self._shared = shared
        self._local = local
        self._room = Room()
        self._asking = 0
        """Reservations that Redis has not answered."""
        self._reported: Mode = "redis"
        self._alone: set[str] = set()
        """Leases that Redis does not know."""

    def rule(self, policy: Policy, replicas: int, lease_seconds: float) -> None:
        """What holds from now on: see LocalLimiter and RedisLimiter."""
        self._local.policy, self._local.replicas = policy, replicas
        self._shared.lease_seconds = lease_seconds

    @property
    def mode(self) -> Mode:
        return "redis" if self._shared.available else self._local.policy

    @property
    def modes(self) -> frozenset[Mode]:
        return frozenset(("redis",)) if self._shared.available else self._local.policies() or frozenset((self.mode,))

    def foresees(self, request: ReserveRequest) -> bool:
        """Of one reservation at a time, and only one that follows a grant, which was charged: else who asks and leaves
        could have the engine work for nothing."""
        return not self._asking and self._shared.available and self._room.has(request)

    async def reserve(self, request: ReserveRequest) -> Grant:
        self._asking += 1
        self._room.forget(request.scopes)
        try:
            grant = await self._shared.reserve(request)
        except StoreError as error:
            self._report(str(error))
            return await self._reserve_alone(request)
        finally:
            self._asking -= 1
        self._report("")
        self._local.adopt(grant)
        self._room.hear(request.scopes, grant.buckets)
        return grant

    async def settle(self, grant: Grant, actual_tokens: int) -> None:
        if grant.lease in self._alone:
            self._alone.remove(grant.lease)
            self._shared.count(grant)
        if grant.source == "redis":
            with self._releasing(grant):
                await self._shared.settle(grant, actual_tokens)
        else:
            await self._local.settle(grant, actual_tokens)

    async def refund(self, grant: Grant) -> None:
        self._alone.discard(grant.lease)
        if grant.source == "redis":
            with self._releasing(grant):
                await self._shared.refund(grant)
        else:
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
        self._room.drop(tenant)
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
        """Used, and not known to be counted in Redis yet."""
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
        """Raises ApiError."""
        limits = [await self._local.limits(scope) for scope in request.scopes]
        policies = frozenset().union(*(each.policies(self._local.policy) for each in limits))
        mode: Mode = next((policy for policy in ("closed", "degraded") if policy in policies), "open")
        try:
            if mode == "closed":
                raise unavailable(Fault.LIMITER_UNAVAILABLE, "rate limits cannot be checked right now")
            grant = replace(await self._local.reserve(request), mode=mode)
        except ApiError as error:
            error.extra_headers = {**error.extra_headers, MODE_HEADER: mode}
            raise
        self._alone.add(grant.lease)
        return grant

    @contextmanager
    def _releasing(self, grant: Grant) -> Iterator[None]:
        """Count a request as this gateway's own until Redis has given its slot back: Redis counts it until then."""
        try:
            yield
        finally:
            self._local.release(grant)

    def _report(self, reason: str) -> None:
        """Logs changes of mode, not every request made in one."""
        if self.mode != self._reported:
            self._reported = self.mode
            log.warning("limiter_mode_changed", mode=self.mode, reason=reason)


@contextmanager
def _changing() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise unavailable(Fault.LIMITER_UNAVAILABLE, "limits cannot be changed while Redis is away") from error
