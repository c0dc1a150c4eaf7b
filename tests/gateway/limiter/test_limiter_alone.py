"""How much several gateways grant together while each is without Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.core.bucket import DAY, MINUTE, Bucket
from gateway.core.errors import ApiError
from gateway.core.limits import Limits, Scope
from gateway.core.tenants import Tenant
from gateway.limiter.base import Grant, ReserveRequest
from gateway.limiter.local import LocalLimiter
from tests.examples import examples

pytestmark = pytest.mark.slow

T = TypeVar("T")
NOON = DAY // 2
FIELDS = {
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "concurrent_requests": "running",
    "tokens_per_day": "today",
}


class Clock:
    """A clock in microseconds that stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> int:
        return self.now


def asking(tokens: int) -> ReserveRequest:
    return ReserveRequest("r", "acme", "k1", tokens, "pirate")


def granted_by_redis(name: str, limit: int, used: int) -> Grant:
    """A grant that tells of one limit, in all three scopes, that so much of it was in use at noon."""
    bucket, field = Bucket.empty(Limits(**{name: limit})), FIELDS[name]
    bucket = replace(bucket, at=NOON, **{field: replace(getattr(bucket, field), used=used)})
    return Grant("lease", asking(0), "redis", (bucket, bucket, bucket))


def gateways(replicas: int, clock: Clock) -> list[LocalLimiter]:
    return [LocalLimiter(replicas, clock) for _ in range(replicas)]


def at_once(answer: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nothing. An event loop for each would take a third of a
    millisecond."""
    try:
        answer.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")


def attempt(limiter: LocalLimiter, tokens: int) -> Grant | None:
    try:
        return at_once(limiter.reserve(asking(tokens)))
    except ApiError:
        return None


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute", "tokens_per_day"])
@given(st.integers(1, 8), st.integers(1, 2000), st.data())
@settings(max_examples=examples(40), deadline=None)
def test_what_gateways_grant_by_themselves_is_bounded_by_what_was_left(name, replicas, limit, data):
    """Every gateway heard the same of Redis, at noon: together they grant at most what was left and what time adds.

    A gateway's share of a limit is rounded down, but is at least 1.
    """
    used = data.draw(st.integers(0, 2 * limit))
    pauses = st.integers(0, 2 * MINUTE) if name.endswith("minute") else st.just(0)
    steps = data.draw(st.lists(st.tuples(st.integers(0, replicas - 1), pauses, st.integers(1, limit)), max_size=20))
    clock, granted = Clock(), 0
    alone = gateways(replicas, clock)
    for gateway in alone:
        gateway.adopt(granted_by_redis(name, limit, used))
    for index, pause, tokens in steps:
        clock.now += pause
        if attempt(alone[index], tokens):
            granted += 1 if name == "requests_per_minute" else tokens
        minutes = (clock.now - NOON) / MINUTE
        assert granted <= max(0.0, max(limit, replicas) * (1 + minutes) - used) + 1e-3


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(-3, 12), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_requests_at_once_stay_within_the_limit_when_gateways_grant_by_themselves(own, left, data):
    """Every gateway heard the same of Redis: how many requests were under way, its own among them.

    `left`: slots that are free; a limit that was lowered meanwhile is exceeded already.
    """
    clock, running = Clock(), sum(own)
    limit = max(1, running + left)
    alone, most = gateways(len(own), clock), max(limit, running)
    heard = granted_by_redis("concurrent_requests", limit, running)
    grants: list[list[Grant]] = [[heard] * count for count in own]
    for gateway, count in zip(alone, own, strict=True):
        for _ in range(count):
            gateway.adopt(heard)
    steps = st.tuples(st.integers(0, len(own) - 1), st.sampled_from([True, True, False]))
    for index, begins in data.draw(st.lists(steps, min_size=10, max_size=60)):
        if begins and (grant := attempt(alone[index], 1)):
            grants[index].append(grant)
            running += 1
        elif not begins and grants[index]:
            end(alone[index], grants[index].pop(data.draw(st.integers(0, len(grants[index]) - 1))))
            running -= 1
        assert running <= most


def end(gateway: LocalLimiter, grant: Grant) -> None:
    if grant.source == "redis":
        gateway.release(grant)
    else:
        at_once(gateway.settle(grant, 1))


@given(st.integers(1, 8), st.integers(1, 60))
@settings(max_examples=examples(40), deadline=None)
@pytest.mark.parametrize("name", FIELDS)
def test_gateways_that_heard_nothing_of_redis_grant_a_share_each(name, replicas, limit):
    alone = gateways(replicas, Clock())
    granted = 0
    for gateway in alone:
        gateway.configure_lazily([Tenant("acme", limits=Limits(**{name: limit}))])
        granted += sum(attempt(gateway, 1) is not None for _ in range(limit + 1))
    assert granted == replicas * max(1, limit // replicas)


def test_slots_of_other_gateways_stay_taken_and_own_ones_are_free_when_they_end():
    """Limit 10, two gateways: A has 8 requests under way and B has 1. B's share of the one that is left is none."""
    first, second = gateways(2, Clock())
    adopt_all(first, [1, 2, 3, 4, 5, 6, 7, 8])
    heard = adopt_all(second, [9])
    assert attempt(second, 1) is None
    assert attempt(first, 1) is None
    second.release(heard)
    assert attempt(second, 1)
    assert attempt(second, 1) is None


def adopt_all(gateway: LocalLimiter, running: Sequence[int]) -> Grant:
    """Let Redis grant requests to a gateway. `running`: how many are under way with each. Returns the last grant."""
    grants = [granted_by_redis("concurrent_requests", 10, count) for count in running]
    for grant in grants:
        gateway.adopt(grant)
    return grants[-1]


def test_a_second_absence_begins_from_what_redis_granted_and_what_runs_from_the_first():
    [alone] = gateways(1, Clock())
    alone.adopt(granted_by_redis("tokens_per_day", 100, 0))
    running = attempt(alone, 40)
    alone.adopt(granted_by_redis("tokens_per_day", 100, 50))
    assert attempt(alone, 11) is None
    assert attempt(alone, 10)
    asyncio.run(alone.settle(running, 5))
    assert attempt(alone, 36) is None
    assert attempt(alone, 35)


def test_what_ends_while_redis_is_back_counts_no_more():
    """Redis is told of it, and a later grant says it."""
    [alone] = gateways(1, Clock())
    running = attempt(alone, 40)
    alone.adopt(granted_by_redis("tokens_per_day", 100, 50))
    asyncio.run(alone.settle(running, 40))
    alone.adopt(granted_by_redis("tokens_per_day", 100, 90))
    assert attempt(alone, 11) is None
    assert attempt(alone, 10)


def test_what_redis_said_to_be_in_use_drains_at_the_share_of_the_limit():
    clock = Clock()
    first, _ = gateways(2, clock)
    first.adopt(granted_by_redis("tokens_per_minute", 1000, 1000))
    clock.now += MINUTE // 2
    assert attempt(first, 251) is None
    assert attempt(first, 250)


@pytest.mark.parametrize("change", ["set", "restore"])
def test_use_is_still_known_after_a_change_of_limits(change):
    [alone] = gateways(1, Clock())
    alone.configure_lazily([Tenant("acme", limits=Limits(tokens_per_day=100))])
    alone.adopt(granted_by_redis("tokens_per_day", 100, 90))
    if change == "set":
        asyncio.run(alone.set_limits(Scope("acme"), {"requests_per_minute": 50}))
    else:
        asyncio.run(alone.restore_limits(Scope("acme")))
    assert attempt(replaced_members(alone), 11) is None
    assert attempt(alone, 10)


def replaced_members(alone: LocalLimiter) -> LocalLimiter:
    """Lift what the grant told of the key and the adapter, so that the tenant's limit alone decides."""
    for scope in (Scope("acme", key="k1"), Scope("acme", adapter="pirate")):
        asyncio.run(alone.set_limits(scope, {"tokens_per_day": None}))
    return alone
