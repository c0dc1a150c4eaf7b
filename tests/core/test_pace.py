"""A step planned ahead is planned late: who comes meanwhile is in it, and the device hardly waits for the host."""

from dataclasses import replace

import pytest

from engine.core.pace import LEAST_LEAD_S, LONGEST_REST_S
from engine.core.types import Lane
from tests.core.virtual import PLAN, SteppedEngine


class Rested(SteppedEngine):
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


def idle_share(stepped, steps):
    """Return the share of the next `steps` steps' time in which the device was idle."""
    begun, first = stepped.clock.now, len(stepped.executor.took)
    stepped.step(steps)
    return 1 - sum(stepped.executor.took[first - 1 : first - 1 + steps]) / (stepped.clock.now - begun)


def test_steps_in_turn_are_not_put_off():
    stepped = Rested(overlaps=False)
    stepped.learn()
    assert stepped.rests == []


def test_nothing_is_put_off_while_the_engine_does_not_know_what_steps_take():
    stepped = Rested(overlaps=True)
    stepped.submit("r", 16, 60)
    stepped.run_until(lambda: stepped.ledger.model.is_warm)
    assert stepped.rests == []
    stepped.finish()
    assert stepped.rests


def test_a_step_is_planned_for_the_time_at_which_the_rest_ends():
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.backlog()
    begun = stepped.clock.now
    stepped.step()
    assert stepped.executor.plans[-1].now == pytest.approx(begun + stepped.rests[-1]) and stepped.rests[-1] > 0.005


@pytest.mark.slow
def test_who_comes_while_the_host_rests_is_in_the_next_step():
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.backlog()
    planned = len(stepped.executor.plans)
    stepped.meanwhile = lambda: stepped.submit("chat", 8, 1)
    stepped.step()
    stepped.meanwhile = lambda: None
    assert "chat" in [chunk.request_id for chunk in stepped.executor.plans[planned].chunks]
    stepped.finish()
    assert len(stepped.times["chat"]) == 1


@pytest.mark.parametrize("plan_seconds", [0.0, 0.001, PLAN, 0.008])
@pytest.mark.parametrize("lag", [0.0, 0.002])
@pytest.mark.slow
def test_the_device_hardly_waits_for_a_host_that_rests(plan_seconds, lag):
    """However long planning takes, and though the host hears of a step's end a while after it."""
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.executor.plan_seconds, stepped.executor.lag = plan_seconds, lag
    stepped.backlog()
    idle_share(stepped, 600)
    stepped.rests.clear()
    assert idle_share(stepped, 100) < 0.005
    assert len(stepped.rests) > 90
    assert stepped.engine.pace.lead < 1.3 * (plan_seconds + lag) + 0.0025


def test_a_host_that_takes_longer_than_a_step_does_not_rest():
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.executor.plan_seconds = 0.030
    stepped.backlog()
    begun = stepped.clock.now
    stepped.step(200)
    assert len(stepped.rests) <= 4
    assert stepped.clock.now - begun < 200 * 0.030 * 1.01
    assert stepped.engine.pace.lead < 0.040, "it does not grow where resting less would not help"


def test_a_stall_of_the_host_changes_little():
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.backlog()
    before = stepped.engine.pace.lead
    stepped.meanwhile = lambda: stepped.clock.advance(1.0)
    stepped.step()
    stepped.meanwhile = lambda: None
    assert before < stepped.engine.pace.lead < 1.25 * before


def test_no_request_waits_for_a_step_that_computes_nothing():
    """When the last token of an answer arrives, one more step, which computes nothing, is already under way."""
    stepped = Rested(overlaps=True)
    stepped.learn()
    lead = stepped.engine.pace.lead
    for number in range(9):
        last = stepped.state.under_way[0].plan
        assert not last.chunks and last.predicted == 0
        stepped.rests.clear()
        stepped.submit(f"r{number}", 16, 1)
        stepped.step()
        assert stepped.rests == []
        stepped.finish()
    assert stepped.engine.pace.lead <= lead


@pytest.mark.slow
def test_waiting_for_something_else_says_nothing_about_the_host():
    stepped = Rested(adapters={"a": 2}, overlaps=True)
    stepped.learn()
    stepped.executor.fetch = lambda plan: None
    stepped.submit("r", 16, 4, adapter_hash="a")
    stepped.step(3)
    stepped.rests.clear()
    lead = stepped.engine.pace.lead
    stepped.step(2000)
    assert "r" in stepped.state.sequences and stepped.rests == []
    assert stepped.engine.pace.lead == lead


def test_a_lead_that_was_not_needed_for_long_can_still_grow():
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.backlog()
    pace = stepped.engine.pace
    for _ in range(10_000):
        pace.note(late=False)
    assert pace.lead == LEAST_LEAD_S


def test_a_prediction_that_is_far_off_stops_no_request_for_long():
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.ledger.model.prices = replace(stepped.ledger.model.prices, step=1e12)
    stepped.submit("r", 16, 40)
    stepped.finish()
    assert max(stepped.rests) == LONGEST_REST_S and sum(stepped.rests) < 3.0


@pytest.mark.parametrize("lane", Lane)
def test_an_idle_engine_starts_at_once(lane):
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.rests.clear()
    stepped.clock.advance(10.0)
    came = stepped.clock.now
    stepped.submit("r", 16, 2, lane)
    stepped.step()
    assert stepped.rests == [] and stepped.clock.now == pytest.approx(came + PLAN)
