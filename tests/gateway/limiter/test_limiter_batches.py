"""A tenant's batch takes of its limits only what its chats leave, on a clock that moves from event to event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

import pytest
from lua_clock import lua_clock

from gateway.core.bucket import MINUTE
from gateway.core.errors import ApiError
from gateway.core.limits import Limits
from gateway.core.tenants import Tenant
from gateway.limiter.base import Grant, ReserveRequest
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter

SECOND = 1_000_000
LIMITS = {
    "tokens": Limits(tokens_per_minute=6000),
    "requests": Limits(requests_per_minute=60),
    "slots": Limits(concurrent_requests=4),
}


def request(tokens: int, *, is_line: bool) -> ReserveRequest:
    return ReserveRequest(
        "r", "acme", "k1", tokens, "pirate", "batch" if is_line else "interactive", is_deferred=is_line
    )


async def attempt(limiter: Any, tokens: int = 1, *, is_line: bool = False) -> Grant | ApiError:
    try:
        return await limiter.reserve(request(tokens, is_line=is_line))
    except ApiError as error:
        return error


@pytest.fixture(params=["redis", "local"])
async def make(request, valkey):
    """Builds limiters of either kind, each with its clock."""
    with lua_clock(valkey) as clock:

        async def build(limits: Limits):
            await valkey.flushall()
            await clock.move()
            limiter = RedisLimiter(valkey, timeout=10.0) if request.param == "redis" else LocalLimiter(clock=clock)
            await limiter.configure([Tenant("acme", limits=limits)])
            return limiter, clock

        yield build


@dataclass
class Traffic:
    """One tenant's chats and, beside them, a batch of any number of lines, of which 16 run at once at most."""

    limiter: Any
    clock: Any
    answered: int = 0
    refused: int = 0
    lines: int = 0
    running: int = 0
    events: list[Any] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    def at(self, seconds: float, happens: Callable[[], Any]) -> None:
        heappush(self.events, (self.clock.now + int(seconds * SECOND), next(self.numbers), happens))

    async def run(self, seconds: float) -> None:
        end = self.clock.now + int(seconds * SECOND)
        while self.events and self.events[0][0] <= end:
            time, _, happens = heappop(self.events)
            await self.clock.move(time - self.clock.now)
            await happens()
        await self.clock.move(end - self.clock.now)

    async def chat(self) -> None:
        grant = await attempt(self.limiter, 215)
        if isinstance(grant, Grant):
            self.answered += 1
            self.at(0.3, lambda: self.limiter.settle(grant, 215))
        else:
            self.refused += 1

    async def line(self) -> None:
        grant = await attempt(self.limiter, 65, is_line=True)
        if isinstance(grant, ApiError):
            self.at(grant.retry_after + 0.03, self.line)
            return
        self.running += 1
        self.at(2.0, lambda: self.end_line(grant))
        if self.running < 16:
            self.at(0.01, self.line)

    async def end_line(self, grant: Grant) -> None:
        await self.limiter.settle(grant, 65)
        self.lines += 1
        self.running -= 1
        if self.running == 15:
            await self.line()

    def chats(self, first: float, last: float, every: float) -> None:
        for number in range(int((last - first) / every)):
            self.at(first + number * every, self.chat)


async def answered(make: Any, limits: Limits, every: float, *, beside_batch: bool) -> Traffic:
    """Chat for a quarter of a minute; start a batch half a minute later, and then chat for two minutes."""
    limiter, clock = await make(limits)
    traffic = Traffic(limiter, clock)
    traffic.chats(0, 15, 1.3)
    if beside_batch:
        traffic.at(45, traffic.line)
    traffic.chats(53, 173, every)
    await traffic.run(180)
    return traffic


@pytest.mark.parametrize(
    ("kind", "every", "least_lines"),
    [("tokens", 1.05, 20), ("tokens", 4.3, 80), ("requests", 4.3, 50), ("slots", 1.05, 150)],
)
async def test_chats_lose_a_tenth_of_their_answers_at_most(make, kind, every, least_lines):
    alone = await answered(make, LIMITS[kind], every, beside_batch=False)
    beside = await answered(make, LIMITS[kind], every, beside_batch=True)
    assert beside.answered >= 0.9 * alone.answered > 20
    assert beside.lines >= least_lines, "what chats leave is for the batch"


@pytest.mark.parametrize(("slots", "every", "least_lines"), [(4, 60, 100), (1, 120, 50)])
async def test_short_bursts_that_take_all_slots_leave_a_line_time_between_them(make, slots, every, least_lines):
    limiter, clock = await make(Limits(concurrent_requests=slots))
    traffic = Traffic(limiter, clock)
    for _ in range(slots):
        traffic.chats(0, 1320, every)
    traffic.at(1, traffic.line)
    await traffic.run(1320)
    assert traffic.answered >= 0.9 * (1320 / every) * slots
    assert traffic.lines >= least_lines


async def test_a_chat_waits_for_one_line_at_most_and_then_nine_more_go_first(make):
    limiter, _ = await make(Limits(concurrent_requests=1))
    await limiter.settle(await attempt(limiter), 1)
    line = await attempt(limiter, is_line=True)
    assert isinstance(await attempt(limiter), ApiError)
    await limiter.settle(line, 1)
    for _ in range(9):
        assert isinstance(await attempt(limiter, is_line=True), ApiError)
        await limiter.settle(await attempt(limiter), 1)
    assert isinstance(await attempt(limiter, is_line=True), Grant)


async def test_chats_refused_by_one_long_line_delay_the_next_by_ninety_answers_at_most(make):
    limiter, _ = await make(Limits(concurrent_requests=1))
    await limiter.settle(await attempt(limiter), 1)
    line = await attempt(limiter, is_line=True)
    assert all([isinstance(await attempt(limiter), ApiError) for _ in range(11)])
    await limiter.settle(line, 1)
    for _ in range(90):
        assert isinstance(await attempt(limiter, is_line=True), ApiError)
        await limiter.settle(await attempt(limiter), 1)
    assert isinstance(await attempt(limiter, is_line=True), Grant)


async def test_a_batch_that_leaves_nothing_learns_of_chats_by_their_refusals(make):
    limiter, clock = await make(LIMITS["tokens"])
    traffic = Traffic(limiter, clock)
    traffic.at(0, traffic.line)
    traffic.chats(60, 300, 4.3)
    await traffic.run(300)
    assert traffic.refused <= 2
    assert traffic.lines > 200


@pytest.mark.parametrize("kind", LIMITS)
async def test_without_chats_a_batch_may_take_a_whole_limit(make, kind):
    limiter, clock = await make(LIMITS[kind])
    tokens, most = (600, 10) if kind == "tokens" else (1, 60 if kind == "requests" else 4)
    taken = [await attempt(limiter, tokens, is_line=True) for _ in range(most + 1)]
    assert [isinstance(one, Grant) for one in taken] == [True] * most + [False]
    for one in taken[:-1]:
        await limiter.settle(one, tokens)
    await clock.move(MINUTE)
    await limiter.settle(await attempt(limiter, 0), 0)
    await clock.move(62 * MINUTE)
    taken = [await attempt(limiter, tokens, is_line=True) for _ in range(most + 1)]
    assert [isinstance(one, Grant) for one in taken] == [True] * most + [False], "nor an hour after the last chat"


async def test_a_refused_line_is_told_when_it_can_fit(make):
    limiter, clock = await make(LIMITS["tokens"])
    await limiter.settle(await attempt(limiter, 2000), 2000)
    refused = await attempt(limiter, 500, is_line=True)
    assert refused.retry_after == pytest.approx((2000 + 500 - 4000 / 4) / 100)
    await clock.move(int(refused.retry_after * SECOND) - 1000)
    assert isinstance(await attempt(limiter, 500, is_line=True), ApiError)
    await clock.move(1001)
    assert isinstance(await attempt(limiter, 500, is_line=True), Grant)


async def test_a_line_longer_than_what_a_batch_may_fill_runs_when_nothing_is_in_use(make):
    limiter, clock = await make(LIMITS["tokens"])
    await limiter.settle(await attempt(limiter, 1000), 1000)
    refused = await attempt(limiter, 5000, is_line=True)
    assert refused.retry_after == pytest.approx(10.0)
    never = await attempt(limiter, 6001, is_line=True)
    assert never.retry_after is None
    hindered = await attempt(limiter, 5500, is_line=True)
    assert hindered.retry_after == pytest.approx(60.0), "the chat's minute must pass first"
    await clock.move(int(refused.retry_after * SECOND) + 1)
    assert isinstance(await attempt(limiter, 5000, is_line=True), Grant)
    assert isinstance(await attempt(limiter, 1000), Grant), "nine tenths of what chats wanted fit beside it"


async def test_slots_that_chats_had_at_once_stay_theirs(make):
    limiter, clock = await make(LIMITS["slots"])
    chats = [await attempt(limiter) for _ in range(2)]
    for grant in chats:
        await limiter.settle(grant, 1)
    lines = [await attempt(limiter, is_line=True) for _ in range(4)]
    assert [isinstance(one, Grant) for one in lines] == [True, True, False, False]
    chats = [await attempt(limiter) for _ in range(2)]
    assert all(isinstance(one, Grant) for one in chats)
    assert isinstance(await attempt(limiter), ApiError)
    for grant in chats:
        await limiter.settle(grant, 1)
    await clock.move(2 * MINUTE)
    assert isinstance(await attempt(limiter, is_line=True), Grant), "two minutes later they are free"


async def test_what_a_chat_reserved_and_did_not_use_is_not_wanted(make):
    limiter, _ = await make(LIMITS["tokens"])
    await limiter.settle(await attempt(limiter, 6000), 40)
    lines = [await attempt(limiter, 400, is_line=True) for _ in range(4)]
    assert [isinstance(one, Grant) for one in lines] == [True, True, True, False]
