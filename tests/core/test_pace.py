"""A step planned ahead is planned late: who comes meanwhile is in it, and the device hardly waits for the host."""

from dataclasses import replace

import pytest

from engine.core.pace import LEAST_LEAD_S, LONGEST_REST_S
from engine.core.types import Lane
from tests.core.virtual import PLAN, House


class Rested(House):
    """Knows for how long the host put every step off, and does something meanwhile."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rests, self.meanwhile = [], lambda: None
        self.executor.plan_seconds = PLAN

    def sleep(self, seconds):
        self.rests.append(seconds)
        super().sleep(seconds)
        self.meanwhile()

    def backlog(self):
        """Something to do for hundreds of steps, of which some have been done."""
        for number in range(4):
            self.batch(f"b{number}", out=800)
        self.step(50)
        self.rests.clear()


def idle_share(house, steps):
    """Of the next so many steps' time, how much the device had nothing to do."""
    begun, first = house.clock.now, len(house.executor.took)
    house.step(steps)
    return 1 - sum(house.executor.took[first - 1 : first - 1 + steps]) / (house.clock.now - begun)


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


def test_a_step_is_planned_for_the_time_at_which_the_rest_ends():
    house = Rested(overlaps=True)
    house.learn()
    house.backlog()
    begun = house.clock.now
    house.step()
    assert house.executor.plans[-1].now == pytest.approx(begun + house.rests[-1]) and house.rests[-1] > 0.005


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


@pytest.mark.parametrize("plan_seconds", [0.0, 0.001, PLAN, 0.008])
@pytest.mark.parametrize("lag", [0.0, 0.002])
def test_the_device_hardly_waits_for_a_host_that_rests(plan_seconds, lag):
    """However long planning takes, and though the host hears of a step's end a while after it."""
    house = Rested(overlaps=True)
    house.learn()
    house.executor.plan_seconds, house.executor.lag = plan_seconds, lag
    house.backlog()
    idle_share(house, 600)
    house.rests.clear()
    assert idle_share(house, 100) < 0.005
    assert len(house.rests) > 90
    assert house.engine.pace.lead < 1.3 * (plan_seconds + lag) + 0.0025


def test_a_host_that_takes_longer_than_a_step_does_not_rest():
    house = Rested(overlaps=True)
    house.learn()
    house.executor.plan_seconds = 0.030
    house.backlog()
    begun = house.clock.now
    house.step(200)
    assert len(house.rests) <= 4
    assert house.clock.now - begun < 200 * 0.030 * 1.01
    assert house.engine.pace.lead < 0.040, "it does not grow where resting less would not help"


def test_a_stall_of_the_host_changes_little():
    house = Rested(overlaps=True)
    house.learn()
    house.backlog()
    before = house.engine.pace.lead
    house.meanwhile = lambda: house.clock.advance(1.0)
    house.step()
    house.meanwhile = lambda: None
    assert before < house.engine.pace.lead < 1.25 * before


def test_nobody_waits_for_a_step_that_computes_nothing():
    """One is under way behind the last token of every answer."""
    house = Rested(overlaps=True)
    house.learn()
    lead = house.engine.pace.lead
    for number in range(9):
        last = house.state.under_way[0].plan
        assert not last.chunks and last.predicted == 0
        house.rests.clear()
        house.submit(f"r{number}", 16, 1)
        house.step()
        assert house.rests == []
        house.finish()
    assert house.engine.pace.lead <= lead


def test_waiting_for_something_else_says_nothing_about_the_host():
    house = Rested(adapters={"a": 2}, overlaps=True)
    house.learn()
    house.executor.fetch = lambda plan: None
    house.submit("r", 16, 4, adapter_hash="a")
    house.step(3)
    house.rests.clear()
    lead = house.engine.pace.lead
    house.step(2000)
    assert "r" in house.state.sequences and house.rests == []
    assert house.engine.pace.lead == lead


def test_a_lead_that_was_not_needed_for_long_can_still_grow():
    house = Rested(overlaps=True)
    house.learn()
    house.backlog()
    pace = house.engine.pace
    for _ in range(10_000):
        pace.note(late=False)
    assert pace.lead == LEAST_LEAD_S


def test_a_prediction_that_is_far_off_stops_nobody_for_long():
    house = Rested(overlaps=True)
    house.learn()
    house.ledger.model.prices = replace(house.ledger.model.prices, step=1e12)
    house.submit("r", 16, 40)
    house.finish()
    assert max(house.rests) == LONGEST_REST_S and sum(house.rests) < 3.0


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
