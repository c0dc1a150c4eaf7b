"""The ledger in Redis against plain arithmetic, through reservations, settlements, renewals, crashes and changes.

4,000 operations in interleavings of 20, on one server and again, fewer, on a cluster.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from gateway.core import budget
from gateway.core.bucket import DAY, Bucket, BucketCharge
from gateway.core.limits import LIMIT_NAMES, POLICIES, Limits, Scope
from gateway.limiter.base import Grant, ReserveRequest
from gateway.limiter.redis import Correction, RedisLimiter
from gateway.redis.connect import connect_cluster
from tests.examples import examples

OPERATIONS = 20
"""Number of operations in one interleaving."""
numbers = count()
limits = st.one_of(st.none(), st.integers(1, 50), st.integers(1, 10**9))
amounts = st.one_of(st.integers(0, 60), st.integers(0, 10**9))
leasts = st.one_of(st.none(), st.none(), amounts)
"""Least tokens of reservations whose tokens are a guess. None means that they are no guess."""
KEY_IDS, ADAPTERS = ("k1", "k2"), ("a1", "a2")
SCOPES = [Scope("t"), *(Scope("t", key=name) for name in KEY_IDS), *(Scope("t", adapter=name) for name in ADAPTERS)]
small = st.one_of(st.none(), st.integers(1, 4))
names = st.sampled_from(LIMIT_NAMES)
shadows = st.lists(names, max_size=2, unique=True).map(tuple)
policies = st.dictionaries(names, st.sampled_from(POLICIES), max_size=2)
any_limits = st.builds(Limits, limits, limits, small, limits, shadows, policies)
which = st.integers(0, 5)
interleavings = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.sampled_from(KEY_IDS), st.sampled_from(ADAPTERS), amounts, leasts),
        st.tuples(
            st.just("reserve"),
            st.sampled_from(KEY_IDS),
            st.sampled_from(ADAPTERS),
            amounts,
            leasts,
            st.booleans(),
            st.booleans(),
        ),
        st.tuples(st.just("settle"), which, amounts),
        st.tuples(st.just("undo"), which),
        st.tuples(st.just("renew"), which),
        st.tuples(st.just("crash"), which),
        st.tuples(st.just("lapse"), which),
        st.tuples(st.just("forget"), st.sampled_from(SCOPES)),
        st.tuples(st.just("change"), st.sampled_from(SCOPES), any_limits),
    ),
    min_size=OPERATIONS,
    max_size=OPERATIONS,
)


@dataclass
class Held:
    """A reservation, whether its gateway still lives or not."""

    grant: Grant
    charges: dict[Scope, BucketCharge]
    expiry: int
    """Time at which its slots expire, in milliseconds."""


class Ledger:
    """What Redis ought to hold, from plain values at the times the server gave; and what it does hold."""

    def __init__(self, client: Redis | RedisCluster, lease_seconds: float) -> None:
        self.client: Any = client
        self.limiter = RedisLimiter(client, timeout=10.0, lease_seconds=lease_seconds)
        self.lease_ms = int(lease_seconds * 1000)
        self.buckets = {scope: Bucket.empty(Limits()) for scope in SCOPES}
        self.held: list[Held] = []
        self.lost: list[Held] = []
        self.gone: list[Held] = []
        """Reservations that Redis has forgotten, although their slots may still count."""

    def running(self, scope: Scope, now: int) -> list[Held]:
        held = (*self.held, *self.lost, *self.gone)
        return [one for one in held if scope in one.charges and one.expiry > now // 1000]

    async def reserve(
        self,
        key: str,
        adapter: str,
        tokens: int,
        least: int | None = None,
        is_counted: bool = False,
        is_batch_line: bool = False,
    ) -> None:
        request = ReserveRequest(
            "r", "t", key, tokens, adapter, least=least, is_counted=is_counted, is_deferred=is_batch_line
        )
        grant = Grant(f"lease-{next(numbers)}", request, "redis")
        decision = await self.limiter.send_reservation(grant)
        now = decision.buckets[0].at
        before = [self.at(scope, now) for scope in request.scopes]
        expected = budget.reserve(before, tokens, now, least, request.num_counted, is_batch_line)
        assert decision == replace(expected, charges=())
        for scope, bucket in zip(request.scopes, expected.buckets, strict=True):
            self.buckets[scope] = replace(self.buckets[scope], demand=bucket.demand)
        if expected.admitted:
            self.buckets.update(zip(request.scopes, expected.buckets, strict=True))
            charges = dict(zip(request.scopes, expected.charges, strict=True))
            self.held.append(Held(grant, charges, now // 1000 + self.lease_ms))
            assert (await self.limiter.send_reservation(grant)).admitted, "a repeated reservation stands"

    def at(self, scope: Scope, now: int) -> Bucket:
        bucket = self.buckets[scope]
        running = self.running(scope, now)
        lines = sum(one.grant.request.is_batch_line for one in running)
        return replace(bucket, running=replace(bucket.running, used=len(running)), batch_lines=lines)

    async def settle(self, index: int, tokens: int, requests: int = 1) -> None:
        if index >= len(self.held):
            return
        one = self.held.pop(index)
        now = await self.limiter.send(Correction(one.grant, requests, tokens))
        for scope, charge in one.charges.items():
            if charge.day >= 0:
                before = self.buckets[scope].drained(now).today
                settled = budget.settle(self.buckets[scope], charge, requests, tokens, now)
                if charge.is_batch_line and now // DAY == charge.day:  # whose tokens count when they are kept
                    settled = replace(settled, today=before.charged(-charge.today))
                self.buckets[scope] = settled
        await self.limiter.send(Correction(one.grant, 0, 0))
        assert not await self.limiter.renew(one.grant)

    async def undo(self, index: int) -> None:
        await self.settle(index, 0, 0)

    async def renew(self, index: int) -> None:
        if index < len(self.held):
            one = self.held[index]
            one.expiry = await self.limiter.renew(one.grant)
            for key in self.limiter.keys(one.grant)[5::2]:
                sign = -1 if one.grant.request.is_batch_line else 1
                assert await self.client.zscore(key, one.grant.lease) == sign * one.expiry

    async def crash(self, index: int) -> None:
        """A gateway dies with a request under way."""
        if index < len(self.held):
            self.lost.append(self.held.pop(index))

    async def lapse(self, index: int) -> None:
        """Let Redis forget a reservation whose gateway was silent for too long. What it reserved stays charged."""
        if index < len(self.held):
            one = self.held.pop(index)
            await self.client.delete(self.limiter.keys(one.grant)[0])
            self.gone.append(one)
            await self.limiter.send(Correction(one.grant, 1, 10**9))
            assert await self.limiter.renew(one.grant) is None

    async def forget(self, scope: Scope) -> None:
        await self.limiter.forget_use(scope)
        self.buckets[scope] = Bucket.empty(self.buckets[scope].limits)
        for one in (*self.held, *self.lost, *self.gone):
            if scope in one.charges:
                one.charges[scope] = BucketCharge(None, None, 0, -1, is_batch_line=one.grant.request.is_batch_line)

    async def change(self, scope: Scope, limits: Limits) -> None:
        assert await self.limiter.set_limits(scope, limits.values()) == limits
        self.buckets[scope] = self.buckets[scope].with_limits(limits)

    async def check(self) -> None:
        """To the last bit."""
        async with self.client.pipeline(transaction=False) as asked:
            for scope in self.buckets:
                asked.hgetall(f"loralane:bucket:{{t}}:{scope.name}")
            states = await asked.execute()
        for bucket, state in zip(self.buckets.values(), states, strict=True):
            found = [float(state.get(name, 0)) for name in (b"requests", b"tokens", b"today", b"at")]
            assert found == [bucket.requests.used, bucket.tokens.used, bucket.today.used, bucket.at]
            demand, packed = bucket.demand, state.get(b"wanted")
            written = msgspec.msgpack.decode(packed) if packed else [-1, 0, 0, 0, 0, 0, 0, 0]
            assert written == [demand.minute, *demand.now, *demand.before, demand.owed]
        assert await self.limiter.outstanding() == len(self.held) + len(self.lost)


async def replay(client: Redis | RedisCluster, lease_seconds: float, actions: list[tuple[Any, ...]]) -> None:
    await client.flushall()
    ledger = Ledger(client, lease_seconds)
    for name, *args in actions:
        await getattr(ledger, name)(*args)
        await ledger.check()
    while ledger.held:
        await ledger.undo(0)
    await ledger.check()


IN_SHADOW = Limits(1, 10, 1, 10, shadow=LIMIT_NAMES)
RESERVE = ("reserve", "k1", "a1", 8)
leases = st.sampled_from([0.001, 0.003, 60.0])
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]
ANY_SPEED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@example(60.0, [("change", Scope("t"), IN_SHADOW), RESERVE, RESERVE, ("settle", 1, 3), RESERVE, ("settle", 0, 9)])
@given(leases, interleavings)
@settings(max_examples=examples(2_000 // OPERATIONS), deadline=None, suppress_health_check=ANY_SPEED, phases=PHASES)
def test_redis_holds_what_the_arithmetic_says_whatever_happens_in_whatever_order(valkey_server, lease_seconds, actions):
    async def run() -> None:
        async with Redis.from_url(valkey_server.connection_url) as client:
            await replay(client, lease_seconds, actions)

    asyncio.run(run())


@given(leases, interleavings)
@settings(max_examples=examples(20), deadline=None, suppress_health_check=ANY_SPEED, phases=PHASES)
def test_a_cluster_holds_the_same(cluster_ports, lease_seconds, actions):
    async def run() -> None:
        async with connect_cluster(f"redis://127.0.0.1:{cluster_ports[0]}") as client:
            await replay(client, lease_seconds, actions)

    asyncio.run(run())
