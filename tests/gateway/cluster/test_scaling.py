"""How many engines there should be, from the loads of those that serve."""

from __future__ import annotations

from engine.core.config import LaneGoals
from engine.core.messages.requests import Lane
from gateway.cluster.scaling import GROW_SECONDS, SHRINK_SECONDS, EngineLoad, Scaler

GOALS = {Lane.INTERACTIVE: LaneGoals(1.0, 0.1, 0.99, 60.0), Lane.BATCH: LaneGoals(100.0, 1.0, 0.9, 3600.0)}


def load(interactive=0.0, batch=0.0, requests=0):
    return EngineLoad({Lane.INTERACTIVE: interactive, Lane.BATCH: batch}, requests, slots=10)


def follow(scaler, loads, seconds, began=0.0):
    """Return the wanted number after a load that lasts."""
    for now in range(int(seconds) + 1):
        wanted = scaler.wanted(loads, began + now)
    return wanted


def test_a_lasting_delay_adds_engines_and_a_burst_does_not():
    scaler = Scaler(1, 8, GOALS)
    assert follow(scaler, [load(interactive=0.9)], GROW_SECONDS - 1) == 1
    assert scaler.wanted([load()], 10.0) == 1
    assert follow(scaler, [load(interactive=0.9)], GROW_SECONDS - 1, began=11.0) == 1
    assert follow(scaler, [load(interactive=0.9)], GROW_SECONDS, began=20.0) == 2


def test_batch_work_adds_engines_only_when_its_own_goal_is_near():
    scaler = Scaler(1, 8, GOALS)
    assert follow(scaler, [load(batch=40.0, requests=10_000)], 60) == 1
    assert follow(scaler, [load(batch=80.0, requests=10_000)], GROW_SECONDS, began=100.0) == 2


def test_no_more_are_asked_for_while_some_start():
    scaler = Scaler(1, 8, GOALS)
    assert follow(scaler, [load(interactive=5.0)], GROW_SECONDS) == 2
    assert follow(scaler, [load(interactive=5.0)], 600, began=10.0) == 2
    assert follow(scaler, [load(interactive=5.0)] * 2, GROW_SECONDS, began=1000.0) == 4
    assert follow(scaler, [load(interactive=5.0)] * 4, GROW_SECONDS, began=2000.0) == 8
    assert follow(scaler, [load(interactive=5.0)] * 8, GROW_SECONDS, began=3000.0) == 8


def test_engines_leave_one_by_one_when_the_others_have_slots_to_spare():
    scaler = Scaler(1, 4, GOALS)
    for count in (1, 2):
        follow(scaler, [load(interactive=9.0)] * count, GROW_SECONDS, began=100.0 * count)
    assert follow(scaler, [load(requests=5)] * 4, SHRINK_SECONDS, began=1000.0) == 4
    assert follow(scaler, [load(requests=3)] * 4, SHRINK_SECONDS - 1, began=2000.0) == 4
    assert follow(scaler, [load(requests=3)] * 4, SHRINK_SECONDS, began=3000.0) == 3
    assert follow(scaler, [load()] * 3, SHRINK_SECONDS, began=4000.0) == 2
    assert follow(scaler, [load()] * 2, SHRINK_SECONDS, began=5000.0) == 1
    assert follow(scaler, [load()], 10 * SHRINK_SECONDS, began=6000.0) == 1


def test_an_engine_that_was_lost_is_waited_for():
    scaler = Scaler(3, 4, GOALS)
    assert follow(scaler, [load(interactive=9.0)] * 2, 600) == 3
    assert follow(scaler, [], 600, began=1000.0) == 3


def test_an_engine_that_finds_no_room_is_given_up_when_the_others_are_idle():
    scaler = Scaler(1, 4, GOALS)
    assert follow(scaler, [load(interactive=9.0)], GROW_SECONDS) == 2
    assert follow(scaler, [load(requests=6)], 600, began=1000.0) == 2
    assert follow(scaler, [load(requests=5)], SHRINK_SECONDS, began=2000.0) == 1


def test_an_engine_that_an_operator_drains_does_not_stop_the_growth():
    scaler = Scaler(2, 4, GOALS)
    for now in range(int(GROW_SECONDS) + 1):
        wanted = scaler.wanted([load(interactive=0.9)], now, drained=1)
    assert wanted == 4
