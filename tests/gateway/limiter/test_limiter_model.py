"""The bucket's arithmetic against exact fractions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core import budget
from gateway.core.bucket import DAY, MINUTE, Bucket, Meter
from gateway.core.errors import ApiError
from gateway.core.limits import Limits, Scope
from gateway.core.tenants import Tenant
from gateway.limiter.base import Grant, ReserveRequest
from gateway.limiter.local import LocalLimiter
from tests.examples import examples

NEAR = Fraction(1, 10**4)
"""Floating point may decide a comparison this close either way, in tokens."""

limits = st.one_of(st.none(), st.integers(1, 50), st.integers(1, 10**9))
amounts = st.one_of(st.integers(0, 60), st.integers(0, 10**9))
reservations = st.tuples(st.just("reserve"), amounts)
settlements = st.tuples(st.just("settle"), amounts)
waits = st.tuples(st.just("wait"), st.integers(0, 300_000_000))
steps = st.lists(st.one_of(reservations, settlements, waits), max_size=30)


@dataclass
class ExactMeter:
    """The definition of a meter, in exact arithmetic."""

    limit: int | None
    used: Fraction = Fraction(0)

    def drain(self, microseconds: int) -> None:
        if self.limit is not None:
            self.used = max(Fraction(0), self.used - Fraction(microseconds * self.limit, 60_000_000))

    def charge(self, amount: int) -> None:
        if self.limit is not None:
            self.used = max(Fraction(0), self.used + amount)

    def room(self, amount: int) -> Fraction:
        return Fraction(1) if self.limit is None or not amount else self.limit - self.used - amount


@dataclass
class CheckedLimiter:
    """A local limiter on a clock that stands still, and what it ought to do."""

    limits: Limits
    now: int = 0
    granted: list[Grant] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self) -> None:
        self.limiter = LocalLimiter(clock=lambda: self.now)
        self.requests = ExactMeter(self.limits.requests_per_minute)
        self.tokens = ExactMeter(self.limits.tokens_per_minute)
        self.run(self.limiter.configure([Tenant("t", limits=self.limits)]))

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def wait(self, microseconds: int) -> None:
        self.now += microseconds
        self.requests.drain(microseconds)
        self.tokens.drain(microseconds)

    def reserve(self, tokens: int) -> None:
        room = min(self.requests.room(1), self.tokens.room(tokens))
        try:
            grant = self.run(self.limiter.reserve(ReserveRequest("r", "t", "k", tokens, "a")))
        except ApiError as error:
            assert room < NEAR
            self.check_wait(error, tokens)
            return
        assert room > -NEAR
        self.requests.charge(1)
        self.tokens.charge(tokens)
        self.granted.append(grant)

    def check_wait(self, error: ApiError, tokens: int) -> None:
        """Exactly as long as is needed: no limit refuses after it, and one still does just before."""
        if error.retry_after is None:
            assert tokens > self.limits.tokens_per_minute
            return
        later = Fraction(error.retry_after)
        meters = [(self.requests, 1), (self.tokens, tokens)]
        room = min(meter.room(amount) + later * (meter.limit or 0) / 60 for meter, amount in meters)
        assert -NEAR < room < NEAR

    def settle(self, tokens: int) -> None:
        if self.granted:
            grant = self.granted.pop(0)
            self.run(self.limiter.settle(grant, tokens))
            self.run(self.limiter.settle(grant, 0))
            self.tokens.charge(tokens - grant.request.tokens)

    def check(self) -> None:
        bucket = self.limiter._bucket(Scope("t")).drained(self.now)
        for meter, exact in ((bucket.requests, self.requests), (bucket.tokens, self.tokens)):
            assert abs(Fraction(meter.used) - exact.used) < NEAR
        assert self.run(self.limiter.outstanding()) == len(self.granted)


@given(st.builds(Limits, limits, limits), steps)
@example(Limits(None, 1000), [("reserve", 300)] * 5 + [("wait", 12_000_000), ("reserve", 300)])
@example(Limits(None, 10), [("reserve", 10), ("wait", 30_000_000), ("settle", 0), ("reserve", 10), ("settle", 60)])
@settings(max_examples=examples(150), deadline=None)
def test_a_limiter_does_what_exact_arithmetic_says(given_limits, actions):
    checked = CheckedLimiter(given_limits)
    try:
        for name, amount in actions:
            getattr(checked, name)(amount)
            checked.check()
    finally:
        checked.loop.close()


@given(st.integers(1, 10**6), st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**5)), max_size=40))
@settings(max_examples=examples(100), deadline=None)
def test_no_more_is_admitted_than_the_limit_and_what_time_adds(limit, arrivals):
    bucket, now, admitted = Bucket.empty(Limits(None, limit)), 0, 0
    for pause, tokens in arrivals:
        now += pause
        decision = budget.reserve([bucket], tokens, now)
        [bucket] = decision.buckets
        admitted += tokens if decision.admitted else 0
        assert admitted <= limit + limit * now / MINUTE + 1e-3


def test_scopes_are_charged_together_or_not_at_all():
    roomy, tight = Bucket.empty(Limits(None, 100)), Bucket.empty(Limits(None, 10))
    refused = budget.reserve([roomy, tight], 50, 0)
    assert (refused.admitted, refused.buckets, refused.charges) == (False, (roomy, tight), ())
    assert refused.misses == ((), ("tokens_per_minute",))
    admitted = budget.reserve([roomy, tight], 10, 0)
    assert (admitted.admitted, [bucket.tokens.used for bucket in admitted.buckets]) == (True, [10.0, 10.0])


def test_of_several_limits_that_refuse_the_longest_wait_is_told():
    tenant, key = Bucket(Meter(60, 60.0), Meter(600, 600.0)), Bucket(Meter(None), Meter(60, 60.0))
    assert budget.explain_refusal([tenant, key], 5) == budget.LimitRefusal("tokens_per_minute", 1, 60, 5.0)
    assert budget.explain_refusal([tenant, Bucket.empty(Limits())], 0) == budget.LimitRefusal(
        "requests_per_minute", 0, 60, 1.0
    )
    assert budget.explain_refusal([tenant, key], 61) == budget.LimitRefusal("tokens_per_minute", 1, 60, None)


def test_a_clock_that_steps_back_drains_nothing():
    assert Meter(60, 30.0).drained(-5_000_000) == Meter(60, 30.0)


def test_a_new_day_begins_at_midnight_and_is_not_corrected_for_the_last():
    bucket = Bucket.empty(Limits(tokens_per_day=100))
    late = budget.reserve([bucket], 90, DAY - 1)
    assert not budget.reserve(late.buckets, 20, DAY - 1).admitted
    early = budget.reserve(late.buckets, 20, DAY)
    assert early.admitted
    [settled] = [budget.settle(early.buckets[0], late.charges[0], 1, 10, DAY + 1)]
    assert (settled.today.used, settled.running.used) == (20, 1)
