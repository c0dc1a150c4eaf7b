"""Usage in Redis against plain sums, through settlements, repetitions, lost replies, crashes and outages."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from redis.asyncio import Redis

from gateway.core.limits import Limits
from gateway.core.tenants import Tenant
from gateway.core.usage import NOTHING, OTHERS, Counts, RowName, UsageRow, day_of
from gateway.limiter.base import Grant, ReserveRequest
from gateway.limiter.redis import Correction, RedisLimiter
from gateway.redis.client import StoreError
from gateway.usage.books import RedisUsageBooks
from tests.examples import examples

LONG_AGO, FAR_AHEAD = date(2000, 1, 1), date(3000, 1, 1)
LIMITED = Tenant("t", limits=Limits(10**6, 10**12, 1000, 10**12))
"""A tenant whose limits are larger than all amounts of a history together, so that none is refused."""
TENANTS = ("t", "free")
amounts = st.integers(0, 10**9)
which, gateways = st.integers(0, 4), st.integers(0, 1)
who = (st.sampled_from(TENANTS), st.sampled_from(["k1", "k2"]), st.sampled_from(["a", "b:c"]))
lanes = st.sampled_from(["interactive", "batch"])
arrivals = st.tuples(st.just("reserve"), gateways, *who, lanes, st.integers(0, 2))
interleavings = st.lists(
    st.one_of(
        arrivals,
        arrivals,
        st.tuples(st.just("work"), which, st.builds(Counts, st.just(0), amounts, amounts, amounts, amounts)),
        st.tuples(st.just("renew"), which, st.booleans()),
        st.tuples(st.just("settle"), which, st.booleans()),
        st.tuples(st.just("settle"), which, st.booleans()),
        st.tuples(st.just("fail"), which),
        st.tuples(st.just("again"), which),
        st.tuples(st.just("crash"), which),
        st.tuples(st.just("forgotten"), which),
        st.tuples(st.just("alone"), gateways, *who, lanes, st.builds(Counts, st.just(1), amounts, amounts, amounts)),
        st.tuples(st.just("deliver"), gateways, st.booleans()),
    ),
    min_size=1,
    max_size=30,
)


@dataclass
class Work:
    """A request and what was counted for it, also after its gateway or Redis has forgotten it."""

    gateway: int = 0
    used: Counts = NOTHING
    counted: Counts = NOTHING
    known: bool = True
    """Redis remembers its reservation."""
    sure: bool = True
    """Its gateway knows what Redis has counted for it."""
    grant: Any = None


def minus(counts: Counts) -> Counts:
    return Counts(*(-number for number in counts.numbers))


class UsageModel:
    """Two gateways' limiters over one Redis, and the usage that must be in it after all that they did."""

    def __init__(self, client: Redis) -> None:
        self.client = client
        self.limiters = [RedisLimiter(client, timeout=10.0, threshold=10**9) for _ in range(2)]
        self.books = RedisUsageBooks(client)
        self.expected: defaultdict[tuple[str, date, RowName], Counts] = defaultdict(Counts)
        self.waiting: list[list[tuple[tuple[str, date, RowName], Counts]]] = [[], []]
        self.running: list[Work] = []
        self.ended: list[Work] = []
        self.lose_reply = False
        for limiter in self.limiters:
            limiter.configure_lazily([LIMITED, Tenant("free")])
            limiter._calls.run = self.losing(limiter._calls.run)
            limiter._pending.deliver_soon = lambda: None  # what is owed is sent when this test says so

    def losing(self, run):
        """Redis does as it is told, and its answer may not arrive."""

        async def flaky(*args):
            reply = await run(*args)
            if self.lose_reply:
                self.lose_reply = False
                raise StoreError("the reply was lost")
            return reply

        return flaky

    async def reserve(self, gateway: int, tenant: str, key: str, adapter: str, lane: str, days_ago: int) -> None:
        work = Work(gateway)
        request = ReserveRequest("r", tenant, key, 10, adapter, lane, lambda: work.used)
        grant = await self.limiters[gateway].reserve(request)
        work.grant = replace(grant, day=grant.day - days_ago)
        self.running.append(work)

    def count(self, work: Work, counts: Counts) -> None:
        """What Redis has of a request becomes `counts`."""
        if work.known:
            request = work.grant.request
            place = (request.tenant, day_of(work.grant.day), request.row)
            self.expected[place] += counts + minus(work.counted)
            work.counted = counts

    async def work(self, index: int, more: Counts) -> None:
        if index < len(self.running):
            work = self.running[index]
            work.used = replace(work.used + more, requests=1)

    async def renew(self, index: int, lose_reply: bool) -> None:
        if index < len(self.running):
            work = self.running[index]
            self.lose_reply = lose_reply
            try:
                renewed = await self.limiters[work.gateway].renew(work.grant)
                assert bool(renewed) == work.known
            except StoreError:
                assert lose_reply
            work.sure = (work.sure or work.known) and not lose_reply
            self.count(work, work.used)

    async def settle(self, index: int, lose_reply: bool) -> None:
        """A reply that is lost is a settlement that is sent again. What Redis has forgotten is counted if it is sure
        that it has not been."""
        if index < len(self.running):
            work = self.running.pop(index)
            self.lose_reply = lose_reply
            limiter = self.limiters[work.gateway]
            await limiter.settle(work.grant, work.used.tokens)
            await limiter._pending._deliver()
            self.arrived(work.gateway)
            work.known = work.known or (work.sure and not lose_reply)
            self.end(work, work.used)

    async def fail(self, index: int) -> None:
        """The engine fails: what the request used is not counted."""
        if index < len(self.running):
            work = self.running.pop(index)
            work.used = NOTHING
            await self.limiters[work.gateway].settle(work.grant, 0)
            self.end(work, NOTHING)

    def end(self, work: Work, counts: Counts) -> None:
        self.count(work, counts)
        work.known = False
        self.ended.append(work)

    async def again(self, index: int) -> None:
        """Settle and renew a request that has ended. None of it may count again."""
        if index < len(self.ended):
            work = self.ended[index]
            limiter = self.limiters[work.gateway]
            await limiter.settle(work.grant, 7)
            assert await limiter.renew(work.grant) is None

    async def crash(self, index: int) -> None:
        """Its gateway is killed: what was known when its lease was last renewed stays counted."""
        if index < len(self.running):
            work = self.running.pop(index)
            self.limiters[work.gateway].leases._held.pop(work.grant.lease)

    async def forgotten(self, index: int) -> None:
        """Redis was away for so long that it has forgotten the reservation."""
        if index < len(self.running):
            work = self.running[index]
            await self.client.delete(self.limiters[0].keys(work.grant)[0])
            work.known = False

    async def alone(self, gateway: int, tenant: str, key: str, adapter: str, lane: str, used: Counts) -> None:
        """Admitted without Redis."""
        request = ReserveRequest("r", tenant, key, 10, adapter, lane, lambda: used)
        day = 30_000
        self.limiters[gateway]._pending.usage_spool.add(request, day, used)
        self.waiting[gateway].append(((tenant, day_of(day), request.row), used))

    async def deliver(self, gateway: int, lose_reply: bool) -> None:
        self.lose_reply = lose_reply and bool(self.waiting[gateway])
        spool = self.limiters[gateway]._pending.usage_spool
        try:
            await spool.deliver()
        except StoreError:
            await self.alone(gateway, "t", "k1", "a", "batch", Counts(1, 5))  # comes while one batch is on its way
            await spool.deliver()
        self.arrived(gateway)

    def arrived(self, gateway: int) -> None:
        """Everything that was used without Redis."""
        assert self.limiters[gateway]._pending.usage_spool.is_empty
        for place, counts in self.waiting[gateway]:
            self.expected[place] += counts
        self.waiting[gateway].clear()

    async def check(self) -> None:
        found = {(row.tenant, row.day, row.name): row.counts for row in await all_rows(self.books) if row.counts}
        assert found == {place: counts for place, counts in self.expected.items() if counts}

    async def close(self) -> None:
        for gateway, limiter in enumerate(self.limiters):
            await self.deliver(gateway, False)
            await limiter.close()
            assert (limiter.undelivered_tokens, limiter.lost_tokens) == (0, 0)
        await self.check()


async def all_rows(books: RedisUsageBooks, tenant: str = "") -> list[UsageRow]:
    return [row async for rows in books.rows(tenant, LONG_AGO, FAR_AHEAD) for row in rows]


async def replay(url: str, actions: list[tuple[Any, ...]]) -> None:
    async with Redis.from_url(url) as client:
        await client.flushall()
        model = UsageModel(client)
        for name, *args in actions:
            await getattr(model, name)(*args)
            await model.check()
        await model.close()


RESERVE = ("reserve", 0, "t", "k1", "a", "batch", 0)
WORK = ("work", 0, Counts(0, 10, 3, 2, 100))


@example([RESERVE, WORK, ("renew", 0, True), WORK, ("settle", 0, True), ("again", 0)])
@example([RESERVE, WORK, ("renew", 0, False), WORK, ("crash", 0), RESERVE, WORK, ("fail", 0)])
@example([RESERVE, WORK, ("renew", 0, False), ("forgotten", 0), WORK, ("settle", 0, False)])
@example([("alone", 1, "free", "k1", "a", "batch", Counts(1, 9)), ("deliver", 1, True), ("deliver", 1, True)])
@given(interleavings)
@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_books_are_the_sums_of_what_happened_whatever_the_order(valkey_server, actions):
    asyncio.run(replay(valkey_server.connection_url, actions))


@dataclass
class Meter:
    """A request that has used what it is told."""

    limiter: RedisLimiter
    used: Counts = NOTHING
    grants: list[Grant] = field(default_factory=list)

    async def reserve(self, adapter: str, key: str = "k") -> Grant:
        return await self.limiter.reserve(ReserveRequest("r", "t", key, 10, adapter, "batch", lambda: self.used))


async def test_a_day_takes_so_many_rows_and_loses_nothing(valkey):
    limiter = RedisLimiter(valkey, timeout=10.0)
    limiter._terms = limiter.leases._terms = dataclasses.replace(limiter._terms, max_rows=2)
    meter, last = Meter(limiter, Counts(1, 10, 0, 5, 7)), Meter(limiter, Counts(1, 1))
    for number in range(4):
        await limiter.settle(await meter.reserve(f"adapter-{number}"), 15)
    grant = await last.reserve("adapter-9")
    await limiter.renew(grant)
    last.used = Counts(1, 3, 0, 4)
    await limiter.settle(grant, 7)
    await limiter.settle(await meter.reserve("adapter-1"), 15)
    rows = {row.name.adapter: row.counts for row in await all_rows(RedisUsageBooks(valkey), "t")}
    one = meter.used
    assert rows == {"adapter-0": one, "adapter-1": one + one, OTHERS: one + one + last.used}


async def test_a_day_is_kept_for_as_long_as_configured(valkey):
    limiter = RedisLimiter(valkey, timeout=10.0, retention_days=10)
    grant = await Meter(limiter, Counts(1, 10)).reserve("a")
    await limiter.settle(grant, 10)
    [key] = await valkey.keys("loralane:usage:*")
    assert key == f"loralane:usage:{{t}}:{day_of(grant.day)}".encode()
    assert await valkey.pexpiretime(key) == (grant.day + 11) * 86_400_000
    await limiter.settle(replace(await Meter(limiter, Counts(1, 10)).reserve("a"), day=grant.day - 12), 10)
    assert await valkey.keys("loralane:usage:*") == [key], "too old to be kept"


async def test_keys_of_usage_lie_in_the_slot_of_their_tenant(valkey):
    limiter = RedisLimiter(valkey, timeout=10.0)
    grant = await Meter(limiter, Counts(1, 10)).reserve("a")
    limiter._pending.usage_spool.add(grant.request, grant.day, Counts(1, 1))
    await limiter._pending.usage_spool.deliver()
    await limiter.renew(grant)
    keys = {key.decode() for key in await valkey.keys("*")}
    assert {key.split(":")[1] for key in keys} >= {"usage", "spooled", "lease"}
    assert len({await valkey.execute_command("CLUSTER KEYSLOT", key) for key in keys}) == 1


async def test_what_redis_has_forgotten_too_long_ago_is_told_to_be_lost(valkey):
    now = 0.0
    limiter = RedisLimiter(valkey, timeout=10.0, clock=lambda: now)
    grant = await Meter(limiter, Counts(1, 10, 0, 5)).reserve("a")
    await valkey.flushall()
    late = Correction(grant, 1, 15, counts=Counts(1, 10, 0, 5), made=0.0)
    now = 3600.0
    await limiter.send(late)
    assert limiter.lost_tokens == 0, "its first settlement may have been the one that took the lease"
    now = 100_000.0
    await limiter.send(late)
    assert limiter.lost_tokens == 15
