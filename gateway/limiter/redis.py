"""Limits in Redis or Valkey, shared by all gateways. One script makes each decision, which is therefore atomic.

Keys of one tenant share the hash tag {tenant}. `*` is the configured prefix; SCOPE is one of `tenant`, `key:ID` and
`adapter:NAME`:

    *limits:{tenant}          hash   scope name -> limits as JSON; `key:*` and `adapter:*` hold those of all others
    *bucket:{tenant}:SCOPE    hash   current use of the scope
    *running:{tenant}:SCOPE   zset   leases of running requests by expiry of their slots, those of batch lines by its
                                     negative; expired ones are removed daily
    *scopes:{tenant}          set    names of scopes with a bucket
    *lease:{tenant}:id        hash   a reservation that is not settled yet, and the usage counted for it so far
    *void:{tenant}:id         text   a reservation that was cancelled before it arrived
    *usage:{tenant}:DAY       hash   usage of that day, by row
    *spooled:{tenant}:id      text   number of the last usage batch from a gateway that had been without Redis

All keys except the limits have an expiry time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import structlog
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from gateway.core.breaker import Breaker
from gateway.core.bucket import DAY
from gateway.core.budget import Decision
from gateway.core.limits import LIMIT_NAMES, LimitName, Limits, Scope
from gateway.core.tenants import Tenant
from gateway.core.usage import NOTHING, Counts
from gateway.limiter.base import Grant, ReserveRequest, StoredLimits, limit_error, new_lease
from gateway.limiter.pending import Correction, PendingSettlements
from gateway.limiter.published import LOST, PublishedLimits, decode_buckets
from gateway.limiter.usage import ScopeUsage
from gateway.limiter.usage_spool import UsageSpool, UsageTerms
from gateway.redis.client import Argument, RedisCalls, Script, StoreError
from gateway.redis.maxmemory import EvictionWatch
from gateway.redis.pipeline import Attempts

log = structlog.get_logger("limiter")

ADMITTED, UNPUBLISHED = 1, -1
ONLY_CHECK = ""
"""Lease id with which the script decides about a reservation, but makes none."""
RECEIPT_SECONDS = 86_400.0
"""How long a reservation can be settled after its last renewal. It should exceed any time that Redis is unavailable."""
RENEWALS = 3
"""Number of times that a lease is renewed within `lease_seconds`, so that it survives two failed renewals."""


class RedisLimiter:
    """A `Limiter` in Redis, shared by all gateways. Methods whose callers need an answer raise StoreError if Redis
    gives none.

    Settlements never raise: those that cannot be delivered are queued and sent once Redis answers again. A
    task renews the leases of running requests, which are short so that those of a gateway that died expire soon.
    """

    def __init__(
        self,
        client: Redis | RedisCluster,
        *,
        timeout: float = 0.05,
        lease_seconds: float = 30.0,
        prefix: str = "loralane:",
        threshold: int = 3,
        cooldown: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        retention_days: int = 400,
    ) -> None:
        """
        Args:
            timeout: seconds that a call to an unavailable Redis may take; see `RedisCalls`.
            lease_seconds: seconds after which a lease expires unless it is renewed.
            prefix: beginning of all keys.
            threshold: consecutive failures that open the circuit breaker.
            cooldown: seconds between two attempts while the circuit breaker is open.
            clock: seconds on a monotonic clock.
            retention_days: days for which a day's usage is kept.
        """
        self._clock = clock
        self._calls = RedisCalls(client, prefix, timeout, Breaker(threshold, cooldown, clock), self._on_answer)
        self._eviction = EvictionWatch(client)
        self.lease_seconds = lease_seconds
        self._receipt_ms = int(max(lease_seconds, RECEIPT_SECONDS) * 1000)
        self._published = PublishedLimits(self._calls, self._receipt_ms)
        self._reserve_script = Script.load("bucket.lua", "reserve.lua")
        self._settle_script = Script.load("bucket.lua", "counted.lua", "settle.lua")
        self._renew_script = Script.load("counted.lua", "renew.lua")
        self._lasting_keys = lru_cache(maxsize=4096)(self._keys_of)
        self._terms = UsageTerms(self._calls, retention_days)
        self._pending = PendingSettlements(self._calls, UsageSpool(self._terms), self.send)
        self._held: dict[str, Grant] = {}
        self._renewed: dict[str, Counts | None] = {}
        """Usage that the last renewal of a running request counted, by lease. None means that this is not known."""
        self._renewal: asyncio.Task[None] | None = None

    @property
    def _slot_ms(self) -> int:
        return int(self.lease_seconds * 1000)

    @property
    def available(self) -> bool:
        return self._calls.available

    @property
    def tenants(self) -> Sequence[str]:
        return self._published.tenants

    async def check_requests(self, request: ReserveRequest) -> None:
        """Ask Redis whether a request would be refused whatever tokens it needs; see `Limiter.check_requests`. Raises
        StoreError if Redis gives no answer."""
        self._calls.check_allowed()
        decision = await self.send_reservation(Grant(ONLY_CHECK, replace(request, tokens=0), "redis"))
        if not decision.admitted:
            raise limit_error(replace(request, tokens=0), decision.buckets)

    async def reserve(self, request: ReserveRequest) -> Grant:
        """Reserve in Redis and return the grant, whose lease is renewed until it is settled. Raises
        ApiError (429), or StoreError if Redis gives no answer; the reservation, if it was made, is then undone
        later."""
        self._calls.check_allowed()
        grant = Grant(new_lease(request), request, "redis")
        try:
            decision = await self.send_reservation(grant)
        except (StoreError, asyncio.CancelledError):
            self._pending.add(Correction(grant, 0, 0, uncertain=True))
            if self.available:
                self._pending.deliver_soon()
            raise
        if not decision.admitted:
            raise limit_error(replace(request, tokens=decision.tokens), decision.buckets)
        day = decision.buckets[0].at // DAY
        grant = Grant(grant.lease, request, "redis", decision.buckets, decision.misses, day, reserved=decision.tokens)
        self._hold(grant)
        return grant

    async def settle(self, grant: Grant, actual_tokens: int) -> None:
        is_first = self._held.pop(grant.lease, None) is not None
        renewed = self._renewed.pop(grant.lease, NOTHING)
        counts = grant.request.used()
        alone = counts - renewed if counts and is_first and renewed is not None else None
        correction = Correction(grant, 1, actual_tokens, counts=counts, made=self._clock(), alone=alone)
        await self._pending.send_or_queue(correction)

    async def renew(self, grant: Grant) -> int | None:
        """Extend the lease of a running request, and count in Redis what the request has used so far. Returns the Unix
        time in milliseconds at which the request's slots in the limits of concurrent requests expire. None means that
        the reservation is settled or expired. Raises StoreError."""
        request, keys = grant.request, self.keys(grant)
        keys = [keys[0], *keys[5::2], self._terms.key(request.tenant, grant.day)]
        args: list[Argument] = [grant.lease, self._slot_ms, self._receipt_ms]
        counts, before = request.used(), self._renewed.get(grant.lease, NOTHING)
        args += self._terms.args(request, grant.day, counts)
        self._renewed[grant.lease] = None
        try:
            renewed, expiry = await self._calls.run(self._renew_script, keys, args)
            self._renewed[grant.lease] = counts if renewed else before
        finally:
            if grant.lease not in self._held:  # it was settled meanwhile
                self._renewed.pop(grant.lease, None)
        return int(expiry) if renewed else None

    async def configure(self, tenants: Iterable[Tenant]) -> None:
        """Replace the known tenants and publish their limits. After a StoreError, limits that were not published are
        published before the tenant's next reservation."""
        await self._published.configure(tenants)

    def configure_lazily(self, tenants: Iterable[Tenant]) -> None:
        self._published.configure_lazily(tenants)

    async def limits(self, scope: Scope) -> Limits:
        """Return the limits in force for a scope. Raises StoreError, as all methods that read or change limits do."""
        return await self._published.limits(scope)

    async def entries(self, tenant: str) -> Sequence[StoredLimits]:
        return await self._published.entries(tenant)

    async def set_limits(self, scope: Scope, changes: Mapping[str, Any]) -> Limits:
        self._calls.check_allowed()
        return await self._published.set(scope, changes)

    async def restore_limits(self, scope: Scope) -> None:
        self._calls.check_allowed()
        await self._published.restore(scope)

    async def forget_use(self, scope: Scope) -> None:
        self._calls.check_allowed()
        await self._published.forget_use(scope)

    async def drop(self, tenant: str) -> None:
        await self._published.drop(tenant)

    async def usage(self, tenant: str) -> Sequence[ScopeUsage]:
        return await self._published.usage(tenant)

    @property
    def undelivered_tokens(self) -> int:
        """Number of tokens that were used and are not known to be counted in Redis."""
        return self._pending.undelivered_tokens

    @property
    def lost_tokens(self) -> int:
        """Tokens that were used and will never be counted, because Redis was unavailable for longer than it keeps
        reservations, too many settlements waited, or `close` could not deliver a settlement."""
        return self._pending.lost_tokens

    async def outstanding(self) -> int:
        return await self._calls.count("lease")

    async def trouble(self) -> str:
        return await self._calls.trouble()

    async def warning(self) -> str:
        return await self._eviction.warning()

    async def close(self) -> None:
        """Stop renewing leases, and send the waiting settlements and usage if Redis answers. The Redis client stays
        open; its creator closes it."""
        if self._renewal is not None:
            self._renewal.cancel()
        await self._pending.close()

    async def send_reservation(self, grant: Grant) -> Decision:
        """Send one reservation to Redis and return the decision, without `charges`, publishing the tenant's limits
        first if Redis lacks them. Does not begin to renew the lease. Raises StoreError."""
        request = grant.request
        await self._published.ensure(request.tenant)
        terms = [self._slot_ms, self._receipt_ms]
        args: list[Argument] = [grant.lease, request.tokens, *terms, request.key_id, request.adapter]
        args += ["" if request.least is None else request.least, request.num_counted, int(request.is_batch_line)]
        reply = await self._calls.run(self._reserve_script, self.keys(grant), args)
        if reply[0] == UNPUBLISHED:
            await self._published.publish(request.tenant)
            reply = await self._calls.run(self._reserve_script, self.keys(grant), args)
        if reply[0] == UNPUBLISHED:
            log.warning("limits_lost", tenant=request.tenant)  # twice in a row: something deletes or evicts them
            raise StoreError(LOST)
        admitted, misses, buckets, tokens = reply
        return Decision(admitted == ADMITTED, decode_buckets(buckets), (), _misses(misses), tokens)

    def keys(self, grant: Grant) -> list[str]:
        """Return the keys that scripts for one reservation access, in the order in which the scripts read them."""
        tenant = grant.request.tenant
        grant_keys = [self._calls.key(kind, tenant, grant.lease) for kind in ("lease", "void")]
        return grant_keys + self._lasting_keys(tenant, grant.request.scopes)

    def _keys_of(self, tenant: str, scopes: Sequence[Scope]) -> list[str]:
        shared = [self._calls.key(kind, tenant) for kind in ("limits", "scopes")]
        names = [(kind, scope.name) for scope in scopes for kind in ("bucket", "running")]
        return shared + [self._calls.key(kind, tenant, name) for kind, name in names]

    async def send(self, correction: Correction, attempts: Attempts | None = None) -> int:
        """Send a correction to Redis. Returns the time of Redis in microseconds since 1970. Of repeated corrections the
        first takes effect. Raises StoreError. `attempts` learns whether the call was repeated.

        If Redis has lost the reservation, as a server does that ended before it had written its file, the request's
        usage is queued to be counted by itself. If the reservation has expired, its tokens are recorded as lost.
        """
        grant, request, attempts = correction.grant, correction.grant.request, attempts or Attempts()
        amounts = [correction.tokens, correction.requests, int(correction.uncertain)]
        args: list[Argument] = [grant.lease, *amounts, request.key_id, request.adapter]
        args += self._terms.args(request, grant.day, correction.counts)
        args.append(0 if request.is_deferred else correction.tokens)
        keys = [*self.keys(grant), self._terms.key(request.tenant, grant.day)]
        settled, now = await self._calls.run(self._settle_script, keys, args, attempts)
        if not settled:
            self._note_unknown(replace(correction, alone=None) if attempts.repeated else correction)
        return int(now)

    def _note_unknown(self, correction: Correction) -> None:
        """Account for the usage of a correction whose reservation Redis does not know."""
        if (self._clock() - correction.made) * 1000 > self._receipt_ms:
            self._pending.record_loss(correction)
        elif correction.alone:
            log.warning("reservation_lost", lease=correction.grant.lease)
            self._pending.count(correction.grant, correction.alone)

    def count(self, grant: Grant) -> None:
        """Queue the usage of a request that another limiter admitted with `grant`. Redis counts it exactly once, as
        soon as it answers."""
        self._pending.count(grant, grant.request.used())

    def _on_answer(self) -> None:
        self._pending.deliver_soon()

    def _hold(self, grant: Grant) -> None:
        self._held[grant.lease] = grant
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._keep_renewing(), name="limiter-leases")

    async def _keep_renewing(self) -> None:
        while self._held:
            await asyncio.sleep(self._slot_ms / 1000 / RENEWALS)
            with suppress(StoreError):
                for grant in tuple(self._held.values()):
                    if grant.lease in self._held:
                        await self.renew(grant)


def _misses(flags: bytes) -> tuple[tuple[LimitName, ...], ...]:
    """Parse the misses in a script's reply, one character for each limit of each scope, '1' for a limit that the
    request did not fit. Returns the names of these limits for each scope."""
    text, width = flags.decode(), len(LIMIT_NAMES)
    if "1" not in text:
        return ((),) * (len(text) // width)
    rows = [text[i : i + width] for i in range(0, len(text), width)]
    return tuple(tuple(name for name, flag in zip(LIMIT_NAMES, row, strict=True) if flag == "1") for row in rows)
