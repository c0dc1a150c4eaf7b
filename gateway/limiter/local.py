"""Limiter in the memory of this process, with the arithmetic of the Redis limiter, for when Redis is unavailable."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from gateway.core.bucket import DAY, Bucket, BucketCharge
from gateway.core.budget import Decision, asks_of, reserve, settle
from gateway.core.errors import ApiError, Fault, unavailable
from gateway.core.limits import EACH, LIMIT_NAMES, LimitName, Limits, Policy, Scope, ScopeKind
from gateway.core.tenants import Tenant
from gateway.limiter.base import Grant, Mode, ReserveRequest, StoredLimits, limit_error, new_lease
from gateway.limiter.usage import ScopeUsage, usage_of

NOTHING = BucketCharge(None, None, 0, -1)
"""Empty charge, of a day that is over. It replaces the charge of a running request in a scope whose use is reset: its
settlement frees the slot and changes no other count."""


def unix_us() -> int:
    return time.time_ns() // 1000


class LocalLimiter:
    """A `Limiter` in memory that enforces this gateway's share, one of `replicas`, of every limit whose policy is not
    `open`. Each scope starts from the bucket of Redis's last grant here, else unused."""

    mode: Mode = "degraded"
    modes: frozenset[Mode] = frozenset(("degraded",))

    def __init__(self, replicas: int = 1, clock: Callable[[], int] = unix_us, policy: Policy = "degraded") -> None:
        """
        Args:
            replicas: number of gateways that share the limits.
            clock: returns microseconds since 1970, like the clock of Redis, because days begin at midnight UTC.
            policy: policy of limits that name none.
        """
        self.policy = policy
        self.replicas = replicas
        self._clock = clock
        self._tenants: dict[str, Tenant] = {}
        self._live: dict[Scope, Limits | Bucket] = {}
        """Bucket that Redis last returned for each scope, with the limits in force. If an operator changed the limits
        before Redis returned a bucket, only the limits."""
        self._buckets: dict[Scope, Bucket] = {}
        self._refused: Counter[tuple[Scope, str]] = Counter()
        self._last: dict[Scope, tuple[int, tuple[LimitName, ...]]] = {}
        """Last refusal in each scope: microseconds since 1970, and the limits that the request did not fit."""
        self._day = 0
        """Day, counted from 1970, to which the counts in `_refused` belong."""
        self._leases: dict[str, dict[Scope, BucketCharge]] = {}
        self._elsewhere: Counter[Scope] = Counter()
        """Number of running requests of this gateway that Redis admitted, by scope."""
        self._own_counts: dict[Scope, int] = {}
        """Number of this gateway's own requests among the running requests that the bucket in `_live` reports, by
        scope."""

    @property
    def tenants(self) -> Sequence[str]:
        return sorted(self._tenants)

    def likely_to_grant(self, request: ReserveRequest) -> bool:
        """Return False always: `reserve` answers at once, so that an early start of the work would gain no time."""
        return False

    async def check_requests(self, request: ReserveRequest) -> None:
        """Refuse a request as `reserve` would whatever tokens it needs, and count each limit that it does not fit; see
        `Limiter.check_requests`. Raises what `reserve` raises."""
        bare, now = replace(request, tokens=0), self._clock()
        decision = self._decide(bare, now)
        if not decision.admitted:
            self._count_misses(request.scopes, decision, now)
            self._remember_demand(request.scopes, decision)
            raise self._refusal(bare, decision.buckets)

    async def reserve(self, request: ReserveRequest) -> Grant:
        """Reserve within this gateway's share of the limits, and count each that does not fit. Raises ApiError: a 429
        if the whole limits do not fit either, else LIMITER_UNAVAILABLE."""
        scopes, now = request.scopes, self._clock()
        decision = self._decide(request, now)
        self._count_misses(scopes, decision, now)
        if not decision.admitted:
            self._remember_demand(scopes, decision)
            raise self._refusal(replace(request, tokens=decision.tokens), decision.buckets)
        lease = new_lease(request)
        for scope, bucket in zip(scopes, decision.buckets, strict=True):
            self._buckets[scope] = self._with_slots(scope, bucket, -1)
        self._leases[lease] = dict(zip(scopes, decision.charges, strict=True))
        return Grant(lease, request, "local", decision.buckets, decision.misses, now // DAY, decision.tokens)

    async def settle(self, grant: Grant, actual_tokens: int) -> None:
        now = self._clock()
        for scope, charge in self._leases.pop(grant.lease, {}).items():
            if scope in self._buckets:
                self._buckets[scope] = settle(self._bucket(scope), charge, 1, actual_tokens, now)

    async def configure(self, tenants: Iterable[Tenant]) -> None:
        self.configure_lazily(tenants)

    def configure_lazily(self, tenants: Iterable[Tenant]) -> None:
        self._tenants = {tenant.name: tenant for tenant in tenants}

    async def drop(self, tenant: str) -> None:
        self._live = {scope: limits for scope, limits in self._live.items() if scope.tenant != tenant}
        self._buckets = {scope: bucket for scope, bucket in self._buckets.items() if scope.tenant != tenant}
        self._last = {scope: last for scope, last in self._last.items() if scope.tenant != tenant}
        self._refused = Counter({key: count for key, count in self._refused.items() if key[0].tenant != tenant})
        self._own_counts = {scope: running for scope, running in self._own_counts.items() if scope.tenant != tenant}

    async def limits(self, scope: Scope) -> Limits:
        return self._limits(scope)

    async def entries(self, tenant: str) -> Sequence[StoredLimits]:
        configured = _everybody(tenant)
        live = [scope for scope in self._live if scope.tenant == tenant and scope not in configured]
        return [
            StoredLimits(scope, self._limits(scope), "live" if scope in self._live else "config")
            for scope in (*configured, *sorted(live, key=attrgetter("order")))
        ]

    async def set_limits(self, scope: Scope, changes: Mapping[str, Any]) -> Limits:
        known, limits = self._live.get(scope), self._limits(scope).changed(changes)
        self._live[scope] = known.with_limits(limits) if isinstance(known, Bucket) else limits
        return limits

    async def restore_limits(self, scope: Scope) -> None:
        known = self._live.pop(scope, None)
        if isinstance(known, Bucket):
            self._live[scope] = known.with_limits(self._limits(scope))

    async def forget_use(self, scope: Scope) -> None:
        bucket = self._bucket(scope)
        self._last.pop(scope, None)
        for name in LIMIT_NAMES:
            self._refused.pop((scope, name), None)
        running, lines = bucket.running, bucket.batch_lines
        self._buckets[scope] = replace(
            Bucket.empty(bucket.limits), at=self._clock(), running=running, batch_lines=lines
        )
        for charges in self._leases.values():
            if scope in charges:
                charges[scope] = replace(NOTHING, is_batch_line=charges[scope].is_batch_line)

    async def usage(self, tenant: str) -> Sequence[ScopeUsage]:
        now, known = self._clock(), {entry.scope for entry in await self.entries(tenant)}
        known |= self._buckets.keys() | self._last.keys()
        scopes = [scope for scope in known if scope.tenant == tenant and scope.member != EACH]
        return [self._usage(scope, now) for scope in sorted(scopes, key=attrgetter("order"))]

    def _usage(self, scope: Scope, now: int) -> ScopeUsage:
        refused = [self._refused[scope, name] for name in LIMIT_NAMES]
        return usage_of(scope, self._bucket(scope).drained(now), refused, self._last.get(scope))

    def policies(self) -> frozenset[Policy]:
        """Return the policies that the enforced limits of all known tenants follow while Redis is unavailable."""
        scopes = {scope for name in self._tenants for scope in _everybody(name)} | self._live.keys()
        return frozenset().union(*(self._limits(scope).policies(self.policy) for scope in scopes))

    def adopt(self, grant: Grant) -> None:
        """Store the limits and use of the scopes of a grant of Redis, and count its request as running until `release`.

        Use of these scopes that was counted locally is dropped, because that of Redis is more exact.
        """
        for scope, bucket in zip(grant.request.scopes, grant.buckets, strict=True):
            self._live[scope] = bucket
            self._elsewhere[scope] += 1
            self._own_counts[scope] = self._elsewhere[scope]
            self._buckets.pop(scope, None)

    def release(self, grant: Grant) -> None:
        """Remove the request of a grant of Redis, after its end, from the count of running requests of its scopes."""
        for scope in grant.request.scopes:
            if self._elsewhere[scope] > 1:
                self._elsewhere[scope] -= 1
            else:
                del self._elsewhere[scope]

    async def outstanding(self) -> int:
        return len(self._leases)

    async def trouble(self) -> str:
        return ""

    async def warning(self) -> str:
        return ""

    async def close(self) -> None:
        self._leases.clear()

    def _decide(self, request: ReserveRequest, now: int) -> Decision:
        """Compute a reservation in this gateway's share of the limits, and make none."""
        buckets = [self._with_slots(scope, self._bucket(scope), 1) for scope in request.scopes]
        return reserve(buckets, request.tokens, now, request.least, request.num_counted, request.is_batch_line)

    def _remember_demand(self, scopes: Sequence[Scope], decision: Decision) -> None:
        """Store what a refused request wanted, so that batch lines leave it to the next attempt."""
        for scope, bucket in zip(scopes, decision.buckets, strict=True):
            self._buckets[scope] = replace(self._buckets[scope], demand=bucket.demand)

    def _limits(self, scope: Scope) -> Limits:
        live = self._live.get(scope)
        if live is not None:
            return live.limits if isinstance(live, Bucket) else live
        if scope.each not in (None, scope):
            return self._limits(scope.each)
        return _configured(self._tenants.get(scope.tenant, Tenant(scope.tenant)))[scope.kind]

    def _bucket(self, scope: Scope) -> Bucket:
        share = self._limits(scope).replica_share(self.replicas, self.policy)
        if scope not in self._buckets:
            self._buckets[scope] = self._last_known(scope, share)
        if self._buckets[scope].at > self._clock():  # which was set back: from now on it drains, even if nothing fits
            self._buckets[scope] = self._buckets[scope].drained(self._clock())
        return self._buckets[scope].with_limits(share)

    def _last_known(self, scope: Scope, share: Limits) -> Bucket:
        """Return the bucket with which this gateway starts to count in a scope: the limits `share`, its share of the
        use that Redis last reported, and the charges of requests that this limiter admitted."""
        now = self._clock()
        bucket = self._share_of_known(scope).with_limits(share).drained(now)
        for charges in self._leases.values():
            if scope in charges:
                charge = charges[scope]
                bucket = (charge if charge.day == now // DAY else replace(charge, today=0)).put_on(bucket)
        return bucket

    def _share_of_known(self, scope: Scope) -> Bucket:
        """Return a bucket with this gateway's share of the use that Redis last reported for a scope, without running
        requests; an empty bucket if Redis has reported none."""
        known = self._live.get(scope)
        if not isinstance(known, Bucket):
            return Bucket.empty(self._limits(scope))
        return replace(
            known,
            requests=replace(known.requests, used=known.requests.used / self.replicas),
            tokens=replace(known.tokens, used=known.tokens.used / self.replicas),
            running=replace(known.running, used=0),
            batch_lines=0,
            today=replace(known.today, used=self._rounded_share(known.today.used)),
        )

    def _rounded_share(self, used: int) -> int:
        """Return this gateway's share of a count that Redis reported for all gateways: `used` / `replicas`, rounded
        up."""
        return -(-used // self.replicas)

    def _with_slots(self, scope: Scope, bucket: Bucket, sign: int) -> Bucket:
        """Return a copy of `bucket` with its running requests raised (`sign` 1) before a reservation, or lowered (-1)
        after it, by the slots that requests admitted by Redis take of this share."""
        # These are this gateway's own; what its share exceeded them by when Redis last answered stays added, because
        # the end of other gateways' requests is not known.
        known, slots = self._live.get(scope), self._elsewhere.get(scope, 0)
        if isinstance(known, Bucket):
            slots += max(0, self._rounded_share(known.running.used) - self._own_counts[scope])
        return replace(bucket, running=replace(bucket.running, used=bucket.running.used + sign * slots))

    def _refusal(self, request: ReserveRequest, buckets: Sequence[Bucket]) -> ApiError:
        """Return the error for a request that does not fit `buckets`: LIMITER_UNAVAILABLE if the whole limits have room
        for it, else a 429."""
        error = limit_error(request, buckets)
        whole = [bucket.with_limits(self._limits(scope)) for scope, bucket in zip(request.scopes, buckets, strict=True)]
        asks = asks_of(len(whole), request.tokens, request.num_counted, request.is_batch_line)
        if not all(bucket.admits(ask) for bucket, ask in zip(whole, asks, strict=True)):
            return error
        message = "rate limits cannot be checked right now, and this gateway's share of them is used up"
        return unavailable(Fault.LIMITER_UNAVAILABLE, message, error.retry_after or 1.0)

    def _count_misses(self, scopes: Sequence[Scope], decision: Decision, now: int) -> None:
        if now // DAY != self._day:
            self._refused.clear()
            self._last.clear()
            self._day = now // DAY
        for scope, names in zip(scopes, decision.misses, strict=True):
            self._refused.update((scope, name) for name in names)
            if names and not decision.admitted:
                self._last[scope] = now, names


def _everybody(tenant: str) -> tuple[Scope, ...]:
    """Return the scopes for which a tenant's configuration has limits: the tenant, and the defaults (EACH) for each of
    its keys and each adapter."""
    return Scope(tenant), Scope(tenant, key=EACH), Scope(tenant, adapter=EACH)


def _configured(tenant: Tenant) -> dict[ScopeKind, Limits]:
    return {"tenant": tenant.limits, "key": tenant.key_limits, "adapter": tenant.adapter_limits}
