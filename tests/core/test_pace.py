"""A step planned ahead is planned late: who comes meanwhile is in it, and the device still never waits for the host."""

import pytest

from engine.core.types import Lane
from tests.core.virtual import House

PLAN = 0.004
"""Seconds the host takes over a plan; a step takes at least 10 ms."""


class Rested(House):
    """Knows for how long the host put every step off, and does something meanwhile."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rests, self.meanwhile = [], lambda: None
        self.executor.plan_seconds = PLAN
        self.engine.pace._sleep = self.sleep

    def sleep(self, seconds):
        self.rests.append(seconds)
        self.clock.advance(seconds)
        self.meanwhile()

    def backlog(self):
        """Something to do for hundreds of steps, of which some have been done."""
        for number in range(4):
            self.batch(f"b{number}", out=800)
        self.step(50)
        self.rests.clear()


def device_time(house, steps):
    """Seconds that so many steps take, and how much of that the device computes."""
    begun, first = house.clock.now, len(house.executor.took)
    house.step(steps)
    return house.clock.now - begun, sum(house.executor.took[first - 1 : first - 1 + steps])


def test_steps_in_turn_are_not_put_off():
    house = Rested(overlaps=False)
    house.learn()
    assert house.rests == []


def test_nothing_is_put_off_while_nobody_knows_what_steps_take():
    house = Rested(overlaps=True)
    house.submit("r", 16, 60)
    house.run_until(lambda: house.ledger.model.is_warm)
    assert house.rests == []
    house.finish()
    assert house.rests


def test_who_comes_while_the_host_rests_is_in_the_next_step():
    house = Rested(overlaps=True)
    house.learn()
    house.backlog()
    planned = len(house.executor.plans)
    house.meanwhile = lambda: house.submit("chat", 8, 1)
    house.step()
    house.meanwhile = lambda: None
    assert "chat" in [chunk.request_id for chunk in house.executor.plans[planned].chunks]
    house.finish()
    assert len(house.times["chat"]) == 1


def test_the_device_waits_for_no_host_that_rests():
    house = Rested(overlaps=True)
    house.learn()
    house.backlog()
    seconds, computed = device_time(house, 100)
    assert len(house.rests) == 100 and min(house.rests) > 0.4 * computed / 100
    assert seconds == pytest.approx(computed, rel=0.01)


def test_a_host_that_takes_as_long_as_a_step_never_rests():
    house = Rested(overlaps=True)
    house.learn()
    house.executor.plan_seconds = 0.030
    house.backlog()
    seconds, computed = device_time(house, 50)
    assert house.rests == []
    assert seconds == pytest.approx(50 * 0.030) and computed < seconds


def test_a_stall_of_the_host_is_forgotten():
    house = Rested(overlaps=True)
    house.learn()
    house.backlog()
    usual = house.engine.pace.lead
    house.executor.plan_seconds = 1.0
    house.step()
    house.executor.plan_seconds = PLAN
    house.rests.clear()
    house.step()
    assert house.rests == [] and house.engine.pace.lead > 0.9
    house.step(300)
    assert house.engine.pace.lead == pytest.approx(usual, rel=0.1)
    assert house.rests


def test_the_margin_at_the_short_end_is_what_hardly_any_step_falls_below():
    house = Rested(overlaps=True)
    house.learn()
    model = house.ledger.model
    assert 0 < model.shortest <= min(1.0, model.margin)
    below = sum(ratio < model.shortest for ratio in model._ratios)
    assert below <= 0.01 * len(model._ratios)


@pytest.mark.parametrize("lane", Lane)
def test_an_idle_engine_starts_at_once(lane):
    house = Rested(overlaps=True)
    house.learn()
    house.rests.clear()
    house.clock.advance(10.0)
    came = house.clock.now
    house.submit("r", 16, 2, lane)
    house.step()
    assert house.rests == [] and house.clock.now == pytest.approx(came + PLAN)
