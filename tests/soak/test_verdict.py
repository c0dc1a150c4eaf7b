"""What the soak test says of readings: it sees a leak of any kind, and none where there is only noise."""

import random

import pytest

from tests.soak.verdict import FEWEST, judge, slope, unexpected

CALM = {
    "gateway heap MiB": 300.0,
    "engine heap MiB": 700.0,
    "engine PSS MiB": 900.0,
    "redis MiB": 3.0,
    "gateway descriptors": 40.0,
    "engine threads": 12.0,
    "tasks": 21.0,
    "processes": 3.0,
    "keys": 60.0,
    "keys that expire": 20.0,
    "adapters known": 10.0,
    "kv pages": 0.0,
    "adapter pages": 40.0,
    "cached pages": 200.0,
    "free pages": 100.0,
    "running": 0.0,
    "waiting": 0.0,
    "leases": 0.0,
    "undelivered tokens": 0.0,
}


def readings(count=60, every=30.0, **growth):
    """`growth`: of a series, with _ for a space, what it gains at each reading."""
    gains = {name.replace("_", " "): gain for name, gain in growth.items()}
    return [
        (number * every, {name: value + gains.get(name, 0.0) * number for name, value in CALM.items()})
        for number in range(count)
    ]


def failed(found):
    return {finding.what for finding in judge(found) if not finding.is_met}


def test_what_stays_is_fine():
    assert failed(readings()) == set()
    assert failed(readings(keys_that_expire=5.0)) == set(), "they go by themselves"


@pytest.mark.parametrize(
    ("name", "gain"),
    [
        *(("gateway_heap_MiB", 0.6), ("engine_heap_MiB", 0.6), ("redis_MiB", 0.6)),
        *(("gateway_descriptors", 0.1), ("engine_threads", 0.1), ("tasks", 0.1), ("keys", 0.1)),
        ("adapters_known", 0.1),
    ],
)
def test_what_grows_is_found(name, gain):
    assert failed(readings(**{name: gain})) == {name.replace("_", " ")}


@pytest.mark.parametrize("name", ["running", "waiting", "leases", "undelivered tokens"])
def test_what_was_left_behind_a_single_time_is_found(name):
    found = readings()
    found[17][1][name] = 1.0
    assert failed(found) == {name}


def test_a_page_that_is_lost_is_found_and_one_that_changes_hands_is_not():
    found = readings()
    found[17][1].update({"free pages": 80.0, "cached pages": 220.0})
    assert failed(found) == set()
    found[30][1]["free pages"] -= 1
    assert failed(found) == {"pages in all"}


def test_noise_and_odd_readings_are_no_trend():
    dice, found = random.Random(1), readings()
    for _, reading in found:
        reading["gateway heap MiB"] += dice.gauss(0, 3)
        reading["gateway descriptors"] += dice.choice((0, 0, 0, 1, 9))
    for number in (55, 58):
        found[number][1]["engine heap MiB"] += 80
    assert failed(found) == set()


def test_a_slope_is_per_minute():
    assert slope([(0.0, 5.0), (30.0, 6.0), (60.0, 7.0), (90.0, 8.0), (120.0, 100.0)]) == pytest.approx(2.0)


def test_a_short_run_does_not_take_noise_for_a_leak_and_sees_a_leak_through_noise():
    dice = random.Random(2)
    for growth, expected in ((0.0, 0), (20.0, 100)):
        runs = [readings(8, 10.0, engine_heap_MiB=growth) for _ in range(100)]
        for run in runs:
            for _, reading in run:
                reading["engine heap MiB"] += dice.gauss(0, 8)
        assert abs(sum(map(bool, map(failed, runs))) - expected) <= 8


def test_too_short_a_run_is_told_so():
    with pytest.raises(ValueError, match="run longer"):
        judge(readings(FEWEST - 1))


def test_a_process_that_is_left_behind_is_found():
    found = readings()
    for _, reading in found[-10:]:
        reading |= {"gateway 2 descriptors": 10.0, "processes": 4.0}
    assert failed(found) == {"processes"}


def test_answers_that_may_not_be_are_named():
    seen = {"chat: 200": 5, "chat: unexpected: http 500 boom": 1, "leave: left": 3}
    assert unexpected(seen) == ["chat: unexpected: http 500 boom"]
