"""A tenant's share of a capacity: what holds for any sequence of requests, and the attack it is there for."""

from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.fairness.shares import Shares
from tests.examples import examples

TENANTS = {"light": 0.001, "usual": 1.0, "other": 1.0, "heavy": 1000.0}


def fill(shares, tenant, weight, capacity, amount=1):
    """Admit requests of a tenant until one is refused; return how many were admitted."""
    admitted = 0
    while shares.admits(tenant, amount, capacity):
        shares.add(tenant, weight, amount)
        admitted += 1
        assert admitted <= 10 * capacity
    return admitted


def test_a_tenant_that_is_alone_has_all_and_the_next_one_its_share():
    shares = Shares()
    assert fill(shares, "greedy", 1.0, 1000, amount=4) == 250
    assert fill(shares, "neighbour", 1.0, 1000) == 500
    assert not shares.admits("greedy", 1, 1000)
    shares.remove("greedy", 4)
    assert not shares.admits("greedy", 1, 1000), "above its share it waits until there is room again"


def test_shares_follow_weights():
    shares = Shares()
    fill(shares, "greedy", 1.0, 1000)
    assert fill(shares, "three", 3.0, 1000) == 750
    assert fill(shares, "one", 1.0, 1000) == 200


@given(st.integers(1, 40), st.integers(40, 5000))
@settings(max_examples=examples(50), deadline=None)
def test_greedy_tenants_leave_every_newcomer_its_share_and_the_total_stays_bounded(tenants, capacity):
    shares = Shares()
    for number in range(tenants):
        assert fill(shares, f"greedy{number}", 1.0, capacity) >= capacity // (number + 1)
    assert shares.total <= capacity * (1 + log(tenants))


@pytest.mark.parametrize("weight", [0.001, 1.0, 1000.0])
def test_a_tenant_that_holds_nothing_gets_one_request_in_whatever_the_others_weigh(weight):
    shares = Shares()
    fill(shares, "heavy", 1000.0, 1000)
    assert shares.admits("small", 1, 1000)
    assert shares.admits("small", 128, 1000), "one request with many answers is one request"
    shares.add("small", weight, 1)
    assert shares.admits("small", 1, 1000) == (weight == 1000.0)


def test_more_tenants_than_capacity_get_one_request_each():
    shares = Shares()
    for number in range(100):
        assert fill(shares, f"tenant{number}", 1.0, 8) >= 1
    assert shares.total <= 8 * (1 + log(100)) + 100


def test_a_capacity_of_nothing_admits_nothing():
    assert not Shares().admits("one", 1, 0)


class Traffic(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.shares, self.capacity, self.live = Shares(), 64, []

    @rule(tenant=st.sampled_from(sorted(TENANTS)), amount=st.integers(1, 8))
    def ask(self, tenant, amount):
        present = {name for name, _ in self.live} | {tenant}
        share = self.capacity * TENANTS[tenant] / sum(TENANTS[name] for name in present)
        held = self.shares.held(tenant)
        fits = self.shares.total + amount <= self.capacity or held == 0 or held + amount <= share - 1e-6
        admitted = self.shares.admits(tenant, amount, self.capacity)
        assert admitted or not fits
        if admitted:
            self.shares.add(tenant, TENANTS[tenant], amount)
            self.live.append((tenant, amount))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        self.shares.remove(*self.live.pop(data.draw(st.integers(0, len(self.live) - 1))))

    @invariant()
    def the_excess_is_bounded(self):
        tenants = len({tenant for tenant, _ in self.live})
        assert self.shares.total <= max(1, tenants) * (self.capacity + 8)

    @invariant()
    def sums_are_exact(self):
        assert self.shares.total == sum(amount for _, amount in self.live)
        assert set(self.shares._holdings) == {tenant for tenant, _ in self.live}
        weights = sum(TENANTS[tenant] for tenant in {tenant for tenant, _ in self.live})
        assert abs(self.shares._weights - weights) < 1e-6


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=examples(60), deadline=None)
