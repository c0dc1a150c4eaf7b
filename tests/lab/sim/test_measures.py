"""Histograms and service gaps."""

import random

import pytest

from lab.sim.fairness import ServiceGaps
from lab.traffic.histogram import Histogram, percentile


def test_percentiles_are_exact_to_a_bin():
    rng, histogram = random.Random(0), Histogram()
    values = [rng.lognormvariate(-4, 1) for _ in range(20_000)]
    for value in values:
        histogram.add(value)
    for share in (0.5, 0.9, 0.99):
        assert histogram.percentile(share) == pytest.approx(percentile(sorted(values), share), rel=0.005)
    assert Histogram.merged([histogram, histogram]).count == 40_000


def test_nothing_has_no_percentiles():
    assert Histogram().percentile(0.5) is None
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0


def test_the_gap_is_of_service_while_both_wait():
    gaps = ServiceGaps()
    for tenant in ("a", "b"):
        gaps.submit(tenant)
        gaps.submit(tenant)
    gaps.sample()
    gaps.start("a", 100)
    gaps.generate("a", 50)
    gaps.sample()
    assert gaps.widest == 200.0
    gaps.start("b", 100)
    gaps.generate("b", 150)
    gaps.sample()
    assert gaps.widest == 400.0
    assert gaps.bound(1000) == 4000.0


def test_service_of_a_tenant_without_waiting_requests_does_not_count():
    gaps = ServiceGaps()
    gaps.submit("a")
    gaps.submit("b")
    gaps.sample()
    gaps.start("b", 10)
    gaps.generate("a", 1000)
    gaps.sample()
    assert gaps.widest == 0.0
