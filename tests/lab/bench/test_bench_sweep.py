"""Sweeps over request rates: the search for the knee, and what each run sends."""

from dataclasses import replace

import pytest

from lab.bench.document import Settings, document
from lab.bench.plan import BenchRequest, Plan
from lab.bench.run import Outcome
from lab.bench.spec import SpecError, override, parse_lane
from lab.bench.stream import Stream
from lab.bench.sweep import Sweeper, at_rate, find_knee, parse_rates
from lab.bench.tables import knee_line

LANE = parse_lane("default:rate=1,in=4,out=2,ttft=1s")
SETTINGS = Settings("http://x", Plan(("m",), (LANE,), duration=30.0))
SHORT = replace(SETTINGS, plan=replace(SETTINGS.plan, lanes=(replace(LANE, n=10),)))


def served_up_to(rate, settings=SHORT):
    """Return a sweeper over a server whose TTFT is 0.5 s up to a rate, and 2 s for every tenth request above it."""

    def measure(settings, label):
        lane = settings.plan.lanes[0]
        slow = [lane.rate > rate and index % 10 == 0 for index in range(lane.n)]
        firsts = [2.0 if is_slow else 0.5 for is_slow in slow]
        streams = [Stream(BenchRequest("m", (1,), 1), 0.0, first, times=[first], chunk_tokens=[1]) for first in firsts]
        return Outcome(document(settings, streams), streams)

    return Sweeper(settings, measure, 0.99)


@pytest.mark.parametrize(("knee", "first"), [(5.0, 1.0), (5.0, 64.0), (0.3, 1.0), (1.0, 1.0)])
def test_the_search_ends_beside_the_knee(knee, first):
    sweeper = served_up_to(knee)
    find_knee(sweeper.holds, first)
    found = sweeper.result()
    assert knee / 1.1 < found.knee <= knee
    assert found.points[-1].rate > knee
    assert len(found.points) < 13
    assert knee_line(found).startswith(f"Knee: {found.knee:.3g} requests/s, the highest rate with 99% of requests")


@pytest.mark.parametrize(("knee", "runs"), [(1e9, 13), (0.0, 13)])
def test_a_search_without_end_is_given_up(knee, runs):
    sweeper = served_up_to(knee)
    find_knee(sweeper.holds, 1.0)
    found = sweeper.result()
    assert len(found.points) == runs
    words = "no higher rate was tried" if knee else "No rate had 99% of requests within TTFT 1000 ms"
    assert words in knee_line(found)


def test_a_rate_above_one_that_failed_is_no_knee():
    sweeper = served_up_to(2.0)
    for rate in (8.0, 1.0, 2.0, 4.0):
        sweeper.holds(rate)
    found = sweeper.result()
    assert [(point.rate, point.holds) for point in found.points] == [(1, True), (2, True), (4, False), (8, False)]
    assert found.knee == 2.0


def test_without_goals_there_is_no_knee():
    plain = replace(SETTINGS, plan=replace(SETTINGS.plan, lanes=(parse_lane("default:rate=1"),)))
    sweeper = served_up_to(2.0, plain)
    assert sweeper.holds(1.0) is False
    assert sweeper.result().points[0].holds is None
    assert "give --ttft-ms" in knee_line(sweeper.result())


def test_each_run_has_its_rate_its_prompts_and_enough_requests():
    first, second = at_rate(SETTINGS, 4.0, 0), at_rate(SETTINGS, 0.1, 1)
    assert (first.plan.lanes[0].rate, first.plan.lanes[0].n, first.plan.prompts, first.warmup) == (4.0, 120, 0, 8)
    assert (second.plan.lanes[0].rate, second.plan.lanes[0].n, second.plan.prompts, second.warmup) == (0.1, 20, 1, 0)
    lanes = (replace(LANE, n=7), parse_lane("batch:rate=2"), parse_lane("interactive:n=3"))
    several = at_rate(replace(SETTINGS, plan=replace(SETTINGS.plan, lanes=lanes)), 5.0, 0)
    assert [(lane.rate, lane.n) for lane in several.plan.lanes] == [(5.0, 7), (2.0, 60), (None, 3)]


def test_rates_are_read():
    assert parse_rates("1,2, 4.5,2") == [1.0, 2.0, 4.5]
    for text in ("", "0", "1,-2", "nan", "1;2"):
        with pytest.raises(SpecError):
            parse_rates(text)


def test_options_replace_what_the_lane_says():
    lane = override(LANE, 0.25, ttft=None, tpot=50.0)
    assert (lane.slo.ttft, lane.slo.tpot, lane.cv) == (1.0, 0.05, 2.0)
    assert override(LANE, None, itl=None) == LANE
