"""Ticks of the throughput-latency curve: round numbers with units, and at least two on each axis of time."""

from __future__ import annotations

import pytest

from lab.plot import duration_label, tick_range


@pytest.mark.parametrize(
    ("seconds", "label"),
    [(0.0005, "500 us"), (0.001, "1 ms"), (0.02, "20 ms"), (0.5, "500 ms"), (1.0, "1 s"), (20.0, "20 s")],
)
def test_ticks_have_units(seconds, label):
    assert duration_label(seconds) == label


@pytest.mark.parametrize(
    ("low", "high", "around"),
    [(0.21, 0.24, (0.2, 0.5)), (0.011, 0.9, (0.01, 1.0)), (0.5, 0.5, (0.2, 1.0)), (3.0, 70.0, (2.0, 100.0))],
)
def test_the_axis_ends_at_the_ticks_around_its_values(low, high, around):
    assert tick_range(low, high) == pytest.approx(around)
