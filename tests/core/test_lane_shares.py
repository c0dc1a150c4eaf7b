"""A tenant's share of a lane: what holds for any sequence of requests, and the attack it is there for."""

from math import log

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core.lane_shares import LaneShares

TENANTS = {"light": 0.001, "usual": 1.0, "other": 1.0, "heavy": 1000.0}


def fill(shares, tenant, weight, capacity, answers=1):
    """Admit requests of a tenant until one is refused; return how many were admitted."""
    admitted = 0
    while not shares.refusal(tenant, weight, answers, capacity):
        shares.add(tenant, weight, answers)
        admitted += 1
        assert admitted <= 10 * capacity
    return admitted


def test_a_tenant_that_is_alone_has_the_lane_and_the_next_one_its_share():
    shares = LaneShares()
    assert fill(shares, "greedy", 1.0, 1000, answers=4) == 250
    assert fill(shares, "neighbour", 1.0, 1000) == 500
    assert shares.refusal("greedy", 1.0, 1, 1000)
    shares.remove("greedy", 4)
    assert shares.refusal("greedy", 1.0, 1, 1000), "above its share it waits until the lane has room again"


def test_shares_follow_weights():
    shares = LaneShares()
    fill(shares, "greedy", 1.0, 1000)
    assert fill(shares, "three", 3.0, 1000) == 750
    assert fill(shares, "one", 1.0, 1000) == 200


@given(st.integers(1, 40), st.integers(40, 5000))
@settings(max_examples=50, deadline=None)
def test_greedy_tenants_leave_every_newcomer_its_share_and_the_lane_stays_bounded(tenants, capacity):
    shares = LaneShares()
    for number in range(tenants):
        assert fill(shares, f"greedy{number}", 1.0, capacity) >= capacity // (number + 1)
    assert shares.total <= capacity * (1 + log(tenants))


def test_a_request_larger_than_the_lane_is_served_when_the_lane_is_empty():
    shares = LaneShares()
    assert not shares.refusal("one", 1.0, 128, 8)
    shares.add("one", 1.0, 128)
    assert "128 answers" in shares.refusal("two", 1.0, 5, 8) and not shares.refusal("two", 1.0, 4, 8)
    assert LaneShares().refusal("one", 1.0, 1, 0)


class Traffic(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.shares, self.capacity, self.live = LaneShares(), 64, []

    @rule(tenant=st.sampled_from(sorted(TENANTS)), answers=st.integers(1, 8))
    def ask(self, tenant, answers):
        present = {name for name, _ in self.live} | {tenant}
        share = self.capacity * TENANTS[tenant] / sum(TENANTS[name] for name in present)
        fits = self.shares.total + answers <= self.capacity or self.shares.held(tenant) + answers <= share - 1e-6
        refused = self.shares.refusal(tenant, TENANTS[tenant], answers, self.capacity)
        assert not (fits and refused)
        if not refused:
            self.shares.add(tenant, TENANTS[tenant], answers)
            self.live.append((tenant, answers))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        self.shares.remove(*self.live.pop(data.draw(st.integers(0, len(self.live) - 1))))

    @invariant()
    def sums_are_exact(self):
        assert self.shares.total == sum(answers for _, answers in self.live)
        assert set(self.shares._holdings) == {tenant for tenant, _ in self.live}
        weights = sum(TENANTS[tenant] for tenant in {tenant for tenant, _ in self.live})
        assert abs(self.shares._weights - weights) < 1e-6


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, deadline=None)
