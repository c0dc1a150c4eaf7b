"""The limiter of the gateway: the shared one in Redis, and a policy for the time when Redis is unavailable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import structlog
from msgspec.structs import replace

from gateway.core.bucket import Ask, Bucket
from gateway.core.errors import ApiError, Fault, unavailable
from gateway.core.limits import Limits, Policy, Scope
from gateway.core.tenants import Tenant
from gateway.limiter.base import MODE_HEADER, Grant, Mode, ReserveRequest, StoredLimits
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter
from gateway.limiter.usage import ScopeUsage
from gateway.redis.client import StoreError

log = structlog.get_logger("limiter")


class FailoverLimiter:
    """A `Limiter` that does not fail because Redis is away, unless a limit's policy demands it: `degraded`, each
    gateway enforces its share; `closed`, requests are refused with 503; `open`, the limit is lifted."""

    # A limit may name its policy; the local limiter holds the default for the others. A grant is settled in the limiter
    # that made it, even if the mode has changed.
    def __init__(self, shared: RedisLimiter, local: LocalLimiter) -> None:
        self._shared = shared
        self._local = local
        self._headroom = Headroom()
        self._asking = 0
        """Number of reservations that Redis has not answered yet."""
        self._full: set[Scope] = set()
        """Scopes whose limits of requests (per minute or concurrent) had no room for another when Redis last answered,
        with a refusal or a grant. If only refusals counted, a tenant could take the last slots with short prompts, and
        have long ones tokenized in the time until the first of them is refused."""
        self._reported: Mode = "redis"
        self._alone: set[str] = set()
        """Leases that the local limiter granted, which Redis does not know."""

    def set_default_policy(self, policy: Policy, replicas: int, lease_seconds: float) -> None:
        """Set, from the next reservation on, the policy of limits that name none while Redis is away, the number of
        gateways that share Redis, and the seconds of a lease."""
        self._local.policy, self._local.replicas = policy, replicas
        self._shared.lease_seconds = lease_seconds

    @property
    def mode(self) -> Mode:
        return "redis" if self._shared.available else self._local.policy

    @property
    def modes(self) -> frozenset[Mode]:
        return frozenset(("redis",)) if self._shared.available else self._local.policies() or frozenset((self.mode,))

    def likely_to_grant(self, request: ReserveRequest) -> bool:
        """Return whether a reservation is almost certain to be granted; see `Limiter.likely_to_grant`."""
        # Redis is available and not waited for, granted the last reservation in each scope, and this one would leave
        # half of every limit free. Otherwise a client that disconnects could make the engine work for nothing.
        return not self._asking and self._shared.available and self._headroom.suffices_for(request)

    async def check_requests(self, request: ReserveRequest) -> None:
        """Refuse a request as `reserve` would; see `Limiter.check_requests`. While Redis is away, refuse none."""
        if not self._full.isdisjoint(request.scopes):
            with suppress(StoreError):
                await self._shared.check_requests(request)

    async def reserve(self, request: ReserveRequest) -> Grant:
        self._asking += 1
        self._headroom.forget(request.scopes)
        try:
            grant = await self._shared.reserve(request)
        except StoreError as error:
            self._report(str(error))
            return await self._reserve_alone(request)
        except ApiError as error:
            if error.limit_kind == "requests":
                self._full |= {scope for scope in request.scopes if str(scope) == error.metadata["scope"]}
            raise
        finally:
            self._asking -= 1
        self._report("")
        self._full.difference_update(request.scopes)
        self._full |= {
            scope for scope, left in zip(request.scopes, grant.buckets, strict=True) if not left.admits(Ask(0))
        }
        self._local.adopt(grant)
        self._headroom.remember(request.scopes, grant.buckets)
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

    async def configure(self, tenants: Iterable[Tenant]) -> None:
        tenants = tuple(tenants)
        await self._local.configure(tenants)
        try:
            await self._shared.configure(tenants)
        except StoreError as error:
            self._report(str(error))

    def configure_lazily(self, tenants: Iterable[Tenant]) -> None:
        tenants = tuple(tenants)
        self._local.configure_lazily(tenants)
        self._shared.configure_lazily(tenants)

    async def drop(self, tenant: str) -> None:
        with _changing():
            await self._shared.drop(tenant)
        self._headroom.drop(tenant)
        self._full = {scope for scope in self._full if scope.tenant != tenant}
        await self._local.drop(tenant)

    @property
    def tenants(self) -> Sequence[str]:
        return self._local.tenants

    async def limits(self, scope: Scope) -> Limits:
        """Return the limits in force for a scope or, while Redis is unavailable, those that the local limiter knows.
        `entries` and `usage` fall back to the local limiter, too."""
        try:
            return await self._shared.limits(scope)
        except StoreError:
            return await self._local.limits(scope)

    async def entries(self, tenant: str) -> Sequence[StoredLimits]:
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
        """Change limits in Redis and then in the local limiter; returns the limits in force. Raises ApiError:
        LIMITER_UNAVAILABLE while Redis is away, as `restore_limits`, `forget_use` and `drop` do, because a change must
        reach every gateway or none."""
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
        """Tokens that were used and are not known to be counted in Redis yet."""
        return self._shared.undelivered_tokens

    @property
    def lost_tokens(self) -> int:
        """Tokens that were used and will never be counted in Redis, since this process started."""
        return self._shared.lost_tokens

    async def outstanding(self) -> int:
        """Return the number of reservations that are not settled, of all gateways in Redis and of the local limiter.
        Raises StoreError while Redis is unavailable."""
        return await self._shared.outstanding() + await self._local.outstanding()

    async def trouble(self) -> str:
        trouble = await self._shared.trouble()
        self._report(trouble)
        return trouble

    async def warning(self) -> str:
        return await self._shared.warning()

    async def close(self) -> None:
        await self._shared.close()
        await self._local.close()

    async def _reserve_alone(self, request: ReserveRequest) -> Grant:
        """Reserve with the local limiter, under the strictest policy of the request's limits. Raises ApiError, with the
        mode header: LIMITER_UNAVAILABLE if that policy is `closed`, or what `LocalLimiter.reserve` raises."""
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
        """Context manager around the settlement of a grant of Redis. When the body ends in any way, the request is
        removed from the local limiter's count of running requests."""
        try:
            yield
        finally:
            self._local.release(grant)

    def _report(self, reason: str) -> None:
        """Log a warning if the mode differs from the one reported last. `reason` is the error that caused the
        change."""
        if self.mode != self._reported:
            self._reported = self.mode
            log.warning("limiter_mode_changed", mode=self.mode, reason=reason)


@contextmanager
def _changing() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise unavailable(Fault.LIMITER_UNAVAILABLE, "limits cannot be changed while Redis is away") from error


SHARE = 0.5
"""Share of each enforced limit that may be in use for a grant to count as likely. The other half is for requests that
other gateways admit meanwhile."""


class Headroom:
    """The last known bucket of each scope, from which a limiter predicts whether Redis will grant a reservation. A
    bucket is remembered from a grant until the next reservation in its scope is requested."""

    def __init__(self) -> None:
        self._heard: dict[Scope, Bucket] = {}

    def remember(self, scopes: Sequence[Scope], buckets: Sequence[Bucket]) -> None:
        self._heard.update(zip(scopes, buckets, strict=True))

    def forget(self, scopes: Sequence[Scope]) -> None:
        for scope in scopes:
            self._heard.pop(scope, None)

    def drop(self, tenant: str) -> None:
        self.forget([scope for scope in self._heard if scope.tenant == tenant])

    def suffices_for(self, request: ReserveRequest) -> bool:
        """Return whether the bucket of each scope of the request is known and, after the request, no enforced limit
        would be used beyond SHARE."""
        heard = [self._heard.get(scope) for scope in request.scopes]
        return all(bucket is not None and bucket.has_headroom(request.tokens, SHARE) for bucket in heard)
