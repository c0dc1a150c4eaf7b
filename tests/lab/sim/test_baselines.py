"""Policies that lanes is compared with: the order in which they serve, and batches that start together."""

import pytest

from engine.core.messages.requests import Lane
from lab.sim.baselines import POLICIES, SCHEDULERS, Mode
from tests.core.virtual import SteppedEngine


@pytest.mark.parametrize("wrong", [{"policy": "random"}, {"scheduler": "sometimes"}])
def test_there_is_no_other_mode(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be one of"):
        Mode(**wrong)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_mode_answers_everything(policy, scheduler):
    stepped = SteppedEngine(max_seqs=4, mode=Mode(policy, scheduler))
    for number in range(12):
        stepped.submit(f"r{number}", 20 + 9 * number, 30 - 2 * number, Lane(number % 2), priority=number % 3)
    stepped.finish()
    assert {stepped.reason(f"r{number}") for number in range(12)} == {"length"}


def started(policy):
    stepped = SteppedEngine(max_seqs=1, mode=Mode(policy))
    stepped.submit("running", 20, 50)
    stepped.step(1)
    stepped.submit("long batch", 300, 90, Lane.BATCH, priority=0)
    stepped.clock.advance(0.01)
    stepped.submit("long chat", 300, 90, priority=1)
    stepped.clock.advance(0.01)
    stepped.submit("short chat", 20, 5, priority=2)
    stepped.finish()
    return sorted(("long batch", "long chat", "short chat"), key=lambda name: stepped.times[name][0])


@pytest.mark.slow
def test_the_orders_of_the_policies():
    assert started("fcfs") == ["long batch", "long chat", "short chat"]
    assert started("sjf") == ["short chat", "long batch", "long chat"]
    assert started("priority") == ["long chat", "short chat", "long batch"]


@pytest.mark.parametrize(("scheduler", "wait"), [("static", 1.0), ("dynamic", 0.05)])
@pytest.mark.slow
def test_batches_are_gathered_and_end_together(scheduler, wait):
    stepped = SteppedEngine(max_seqs=4, mode=Mode("fcfs", scheduler))
    stepped.submit("first", 20, 40)
    stepped.submit("second", 200, 4)
    begun = stepped.clock.now
    stepped.run_until(lambda: stepped.state.running)
    assert stepped.clock.now - begun == pytest.approx(wait, abs=0.15)
    assert set(stepped.state.running) == {"first", "second"}
    stepped.submit("third", 20, 4)
    stepped.run_until(lambda: "first" in stepped.ends)
    assert "third" not in stepped.times
    stepped.finish()
    for number in range(4):
        stepped.submit(f"full{number}", 20, 4)
    stepped.step(2)
    assert all(f"full{number}" in stepped.times for number in range(4)), "a full batch waits for no other request"


def test_shortest_job_first_goes_by_what_is_expected():
    stepped = SteppedEngine(num_pages=4000, max_model_len=10_000, max_seqs=1, mode=Mode("sjf"))
    stepped.submit("running", 20, 50)
    stepped.step(3)
    stepped.submit("asked", 20, 100)
    stepped.submit("open", 20, 110, expected_tokens=30)
    stepped.finish()
    assert stepped.times["open"][0] < stepped.times["asked"][0]


def order(stretch, later):
    """Return the names of requests by start: one with a long answer, and short ones that arrive `later` seconds later,
    two by two."""
    mode = Mode("sjf", sjf_stretch=stretch)
    stepped = SteppedEngine(num_pages=4000, max_model_len=10_000, max_seqs=1, mode=mode)
    stepped.submit("running", 20, 50)
    stepped.step(3)
    stepped.submit("long", 20, 100)
    for number in range(4):
        stepped.submit(f"short{number}", 20, 30, arrival=stepped.clock.now + later * number)
    stepped.finish()
    return sorted((name for name in stepped.times if name != "running"), key=lambda name: stepped.times[name][0])


def test_the_first_burst_is_in_order_of_length():
    stepped = SteppedEngine(num_pages=4000, max_seqs=1, mode=Mode("sjf"))
    for number in (3, 1, 2):
        stepped.submit(f"r{number}", 10 * number, 10 * number)
    stepped.finish()
    assert sorted(stepped.times, key=lambda name: stepped.times[name][0]) == ["r1", "r2", "r3"]


def test_shortest_job_first_starves_no_long_one():
    assert order(1e6, later=0.1) == ["short0", "short1", "short2", "short3", "long"]
    assert order(1.0, later=1.0)[:2] == ["short0", "long"]
