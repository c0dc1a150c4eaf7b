"""A step planned ahead is planned late: who comes meanwhile is in it, and the device hardly waits for the host."""

from dataclasses import replace
from random import Random

import pytest

from engine.core.messages.requests import Lane
from engine.core.plan.pace import FIRST_LEAD_S, FIRST_STEPS, LONGEST_REST_S, NEEDS_KEPT, Need, Needs
from tests.core.virtual import PLAN, STEP, SteppedEngine


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


def test_a_stall_of_the_host_changes_nothing():
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.backlog()
    stepped.step(NEEDS_KEPT)
    before = stepped.engine.pace.lead
    stepped.meanwhile = lambda: stepped.clock.advance(1.0)
    stepped.step()
    stepped.meanwhile = lambda: None
    stepped.step()
    assert stepped.executor.late[-2:] == [True, False]
    assert stepped.engine.pace.lead == pytest.approx(before, rel=0.01)


def test_a_host_that_becomes_slower_keeps_the_device_waiting_for_less_than_a_step():
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.backlog()
    stepped.step(NEEDS_KEPT)
    assert stepped.engine.pace.lead < 2 * PLAN
    stepped.executor.plan_seconds = 2.5 * PLAN
    assert 0 < idle_share(stepped, 100) < 0.01
    assert idle_share(stepped, 100) < 0.001
    stepped.executor.plan_seconds = PLAN / 4
    stepped.batch("more", out=900, prompt=16)
    stepped.step(NEEDS_KEPT + 20)
    assert stepped.engine.pace.lead < PLAN, "and the time is forgotten when it was slow"


def mixed_traffic(stepped, steps):
    """Serve a backlog beside prompts that come at any time, and return the share of late steps."""
    first, rng = len(stepped.executor.late), Random(1)
    for number in range(steps):
        if number % 60 == 0:
            stepped.batch(f"b{first}-{number}", out=250)
        if rng.random() < 0.1:
            stepped.submit(f"chat{first}-{number}", rng.randrange(2, 60), 4)
        stepped.step()
    return sum(stepped.executor.late[first:]) / (len(stepped.executor.late) - first)


@pytest.mark.parametrize("launch_seconds", [0.0, 0.004, 0.009])
@pytest.mark.slow
def test_at_most_one_step_in_a_hundred_is_late_in_mixed_traffic(launch_seconds):
    """Steps with prompts are launched kernel by kernel, for up to nine tenths of the shortest step, and the host does
    not know before it plans which steps have any."""
    stepped = Rested(overlaps=True, max_seqs=8)
    stepped.learn()
    stepped.executor.launch_seconds, noise = launch_seconds, Random(2)
    stepped.meanwhile = lambda: setattr(stepped.executor, "plan_seconds", 0.002 * noise.lognormvariate(0, 0.3))
    mixed_traffic(stepped, NEEDS_KEPT)
    assert mixed_traffic(stepped, 1000) <= 0.01
    assert len(stepped.rests) > 1000
    assert stepped.state.counters.late_steps <= sum(stepped.executor.late)


def test_the_rest_begins_when_the_device_does_and_not_when_the_host_has_launched():
    """The host is still launching a step kernel by kernel when the device begins it."""
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.backlog()
    stepped.executor.launch_seconds = 0.008
    stepped.submit("prompt", 16, 1)
    stepped.step()
    device = stepped.executor.device
    stepped.step()
    predicted, lead = stepped.executor.plans[-2].forecast.seconds, stepped.engine.pace.lead
    began = device._ends[0] - sum(stepped.executor.measured[-2:])
    assert stepped.executor.plans[-1].now == pytest.approx(began + predicted - lead, abs=1e-6)


def test_no_request_waits_for_a_step_that_computes_nothing():
    """When the last token of an answer arrives, one more step, which computes nothing, is already under way."""
    stepped = Rested(overlaps=True)
    stepped.learn()
    lead = stepped.engine.pace._needs.lead(STEP)
    for number in range(9):
        last = stepped.state.steps.under_way[0].plan
        assert not last.chunks and last.forecast.seconds == 0
        stepped.rests.clear()
        stepped.submit(f"r{number}", 16, 1)
        stepped.step()
        assert stepped.rests == []
        stepped.finish()
    assert stepped.engine.pace._needs.lead(STEP) <= lead


@pytest.mark.slow
def test_waiting_for_something_else_says_nothing_about_the_host():
    stepped = Rested(adapters={"a": 2}, overlaps=True)
    stepped.learn()
    stepped.executor.fetch = lambda plan: None
    stepped.submit("r", 16, 4, adapter_hash="a")
    stepped.step(3)
    stepped.rests.clear()
    lead = stepped.engine.pace.lead
    stepped.step(300)
    assert "r" in stepped.state.sequences and stepped.rests == []
    assert stepped.engine.pace.lead == lead


def test_the_lead_is_the_second_largest_that_recent_steps_would_have_needed():
    needs = Needs()
    for number in range(NEEDS_KEPT):
        assert number >= FIRST_STEPS or needs.lead(0.010) == FIRST_LEAD_S
        needs.add(Need(number / 1e6, error=0.0))
    assert needs.lead(0.010) == pytest.approx((NEEDS_KEPT - 2) / 1e6)
    needs.add(Need(1.0, error=0.0))
    assert needs.lead(0.010) == pytest.approx((NEEDS_KEPT - 1) / 1e6), "one stall changes nothing"
    for _ in range(NEEDS_KEPT):
        needs.add(Need(0.002, error=0.1))
    assert needs.lead(0.010) == pytest.approx(0.003)
    assert needs.lead(0.100) == pytest.approx(0.012), "an error of the prediction grows with the step"


def test_computing_the_lead_is_part_of_the_rest_and_is_spared_a_host_that_cannot_rest(monkeypatch):
    stepped, computed, lead = Rested(overlaps=True), [], Needs.lead

    def slow_lead(needs, predicted):
        stepped.clock.advance(0.001)
        computed.append(lead(needs, predicted))
        return computed[-1]

    stepped.learn()
    stepped.backlog()
    monkeypatch.setattr(Needs, "lead", slow_lead)
    begun = stepped.clock.now
    stepped.step()
    assert stepped.executor.plans[-1].now == pytest.approx(begun + stepped.rests[-1] + 0.001) and len(computed) == 1
    under_way = stepped.state.steps.under_way[0].plan
    ends = stepped.engine.pace._begun_by_device(stepped.engine.pace._under_way[0]) + under_way.forecast.seconds
    stepped.step()
    assert stepped.executor.plans[-1].now == pytest.approx(ends - computed[-1])
    stepped.executor.plan_seconds = 0.030
    stepped.step(4)
    computed.clear()
    stepped.step(50)
    assert len(computed) < 10, "only behind steps that take longer than planning"


def late_and_host_bound(stepped, steps):
    """Return how many of the next `steps` steps are late, and how many of them no earlier plan would have prevented."""
    counters = stepped.state.counters
    late, host_bound = counters.late_steps, counters.host_bound_steps
    stepped.step(steps)
    return counters.late_steps - late, counters.host_bound_steps - host_bound


def test_a_step_that_is_late_though_the_host_never_rests_is_host_bound():
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.backlog()
    stepped.executor.plan_seconds = 0.030
    stepped.step(4)
    late, host_bound = late_and_host_bound(stepped, 100)
    assert late == host_bound == 100 and len(stepped.rests) <= 4


def test_a_step_that_is_late_because_the_host_overslept_is_not_host_bound():
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.backlog()
    stepped.step(NEEDS_KEPT)
    stepped.meanwhile = lambda: stepped.clock.advance(1.0)
    late = late_and_host_bound(stepped, 1)
    stepped.meanwhile = lambda: None
    assert (late, late_and_host_bound(stepped, 10)) == ((1, 0), (0, 0))


@pytest.mark.parametrize(
    ("launching", "planning", "expected"),
    [(0.020, PLAN, (0, 0)), (0.024, PLAN, (1, 0)), (0.020, 0.030, (1, 1))],
    ids=["in time", "launched too late", "planned for too long"],
)
def test_a_step_behind_a_long_launch_is_host_bound_only_if_an_earlier_launch_had_not_helped(
    launching, planning, expected
):
    """The host rests for about 10 ms, and launches a step with a prompt that the device computes in 26 ms."""
    stepped = Rested(overlaps=True)
    stepped.learn()
    stepped.backlog()
    stepped.step(NEEDS_KEPT)
    stepped.executor.launch_seconds = launching
    stepped.submit("prompt", 32, 1)
    assert late_and_host_bound(stepped, 1) == (0, 0)
    assert 0.007 < stepped.rests[-1] < 0.012 and stepped.executor.took[-1] == pytest.approx(0.026)
    stepped.executor.plan_seconds = planning
    assert late_and_host_bound(stepped, 1) == expected


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
