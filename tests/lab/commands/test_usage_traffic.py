"""What usage tells of traffic: rates of days that have passed, adapters apart from base models, and the settings."""

import os
from datetime import UTC, date, datetime

import pytest

from gateway.core.usage import Counts
from lab.commands.simulate import make_setup
from lab.commands.usage_traffic import DayLine, advise, traffic_of

NOON = datetime(2026, 11, 3, 12, tzinfo=UTC)
MONDAY, TODAY = date(2026, 11, 1), date(2026, 11, 3)


def line(tenant, adapter, lane, day, requests):
    return DayLine(tenant, adapter, lane, day, Counts(requests, 200 * requests, 50 * requests, 20 * requests))


LINES = [
    line("acme", "base", "interactive", MONDAY, 1000),
    line("acme", "support", "interactive", MONDAY, 3000),
    line("acme", "legal", "batch", TODAY, 1500),
    line("globex", "support", "interactive", TODAY, 2000),
    line("globex", "*", "interactive", TODAY, 500),
]


def test_rates_count_only_the_part_of_today_that_has_passed():
    found = traffic_of(LINES, {"base"}, NOON)
    assert found.seconds == 2.5 * 86_400
    assert found.rate == pytest.approx(8000 / (2.5 * 86_400))
    assert found.busiest == pytest.approx(4000 / 43_200)  # today's, in half a day


def test_lengths_shares_and_adapters():
    found = traffic_of(LINES, {"base"}, NOON)
    assert (found.prompt, found.output, found.cached) == (200, 20, 0.25)
    assert found.lanes == {"interactive": 6500, "batch": 1500}
    assert list(found.tenants.items()) == [("acme", 5500), ("globex", 2500)]
    use = found.adapters
    assert (use.adapters, use.busiest_day) == (2, 2)
    assert use.share == 7000 / 8000  # with requests of adapters that have no row of their own
    assert use.first == 5000 / 7000


def test_without_adapters_there_is_no_popularity():
    assert traffic_of(LINES[:1], {"base"}, NOON).adapters is None


@pytest.mark.parametrize("lines", [[], [DayLine("acme", "base", "batch", TODAY, Counts(3, 30, 0, 0))]])
def test_days_without_usage_are_refused(lines):
    with pytest.raises(ValueError, match="no usage"):
        traffic_of(lines, {"base"}, NOON)


def test_settings_follow_from_the_busiest_day():
    found, setup = traffic_of(LINES, {"base"}, NOON), make_setup("cpu-smollm2", None, os.environ)
    advice = advise(found, setup)
    (setting,) = advice.settings
    assert setting.name == "engine.host_adapter_gb" and "up to 2 adapters on one day" in setting.reason
    assert advice.steady.is_enough and len(advice.notes) == 1
    many = traffic_of([line("acme", "base", "batch", TODAY, 10_000_000)], {"base"}, NOON)
    assert "engines are needed" in advise(many, setup).notes[0]
