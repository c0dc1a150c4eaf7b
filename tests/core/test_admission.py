"""Who is turned away, with what reason and what Retry-After; and the modes kept for comparison."""

import pytest

from engine.core.config import CoreConfig, LaneGoals, Scheduling
from engine.core.types import Lane
from tests.core.virtual import House

PATIENT = LaneGoals(ttft_s=0.5, itl_s=0.1, max_wait_s=1.0)


def refusal(house, name):
    return house.ends[name].refusal


def test_a_wait_beyond_the_promise_is_refused_with_the_true_wait():
    house = House(max_seqs=2, interactive=PATIENT)
    house.learn()
    for number in range(40):
        house.submit(f"r{number}", 100, 60)
    house.step(1)
    refused = [name for name in house.ends if name.startswith("r") and house.reason(name) == "queue_timeout"]
    taken = [f"r{number}" for number in range(40) if f"r{number}" not in refused]
    assert refused and taken and refused == [f"r{number}" for number in range(len(taken), 40)]
    retry = refusal(house, refused[-1]).retry_after
    start = house.clock.now
    house.run_until(lambda: house.clock.now >= start + retry)
    house.submit("again", 100, 60)
    house.step(1)
    assert "again" not in house.ends, "who asks again after Retry-After is taken"
    house.finish()
    waits = [house.times[name][0] - start for name in taken]
    assert 0.4 < max(waits) < 2.5, "and the wait was about what was promised"


def test_a_deadline_that_cannot_be_met_is_said_at_once():
    house = House(max_seqs=4)
    house.learn()
    for number in range(50):
        house.batch(f"b{number}", deadline=house.clock.now + 1000.0)
    house.step(10)
    house.batch("never", deadline=house.clock.now + 1000.5)
    house.step(1)
    assert "never" not in house.ends
    for number in range(50):
        house.batch(f"early{number}", deadline=house.clock.now + 3.0)
        house.step(1)
    reasons = {house.reason(name) for name in house.ends if name.startswith("early")}
    assert reasons == {"queue_timeout"}
    assert all(refusal(house, name).retry_after > 0 for name in house.ends if name.startswith("early"))


def test_a_full_queue_sends_the_last_of_the_lower_lane_away():
    house = House(max_seqs=1, max_waiting=3)
    house.submit("running", 20, 200)
    house.step(1)
    for number in range(3):
        house.batch(f"b{number}")
    house.submit("chat", 20, 2)
    house.step(1)
    assert house.reason("b2") == "lane_queue_full" and refusal(house, "b2").retry_after >= 1.0
    house.batch("b3")
    house.step(1)
    assert house.reason("b3") == "lane_queue_full"
    house.finish()
    assert {house.reason(name) for name in ("running", "chat", "b0", "b1")} == {"length"}


def test_a_full_queue_takes_one_request_of_a_tenant_that_has_nothing_waiting():
    house = House(max_seqs=1, max_waiting=3)
    for number in range(5):
        house.submit(f"greedy{number}", 20, 200, tenant="greedy", weight=1000.0)
    for number in range(2):
        house.submit(f"other{number}", 20, 2, tenant="other")
    house.step(1)
    assert sorted(house.ends) == ["greedy3", "greedy4", "other1"]
    assert {house.reason(name) for name in house.ends} == {"lane_queue_full"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 0.0},
        {"weight": float("nan")},
        {"weight": 1e-310},
        {"deadline": float("nan")},
        {"itl": float("nan")},
        {"out": 0},
    ],
)
def test_figures_that_would_upset_the_books_are_refused(wrong):
    house = House()
    house.batch("wrong", **{"out": 4} | wrong)
    house.step(1)
    assert house.reason("wrong") == "invalid_request"


def test_an_idle_hour_is_not_held_against_the_batch_lane():
    house = House(max_seqs=2)
    house.learn()
    for number in range(30):
        house.submit(f"chat{number}", 20, 30)
        house.step(20)
    house.finish()
    house.clock.advance(3600.0)
    for number in range(20):
        house.batch(f"b{number}", 32, 20, deadline=house.clock.now + 60.0)
    house.finish()
    assert {house.reason(f"b{number}") for number in range(20)} == {"length"}


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority", "lanes"])
@pytest.mark.parametrize("scheduler", ["continuous", "dynamic", "static"])
def test_every_mode_answers_everything(policy, scheduler):
    house = House(max_seqs=4, scheduling=Scheduling(scheduler=scheduler, policy=policy))
    for number in range(12):
        house.submit(f"r{number}", 20 + 9 * number, 30 - 2 * number, Lane(number % 2), priority=number % 3)
    house.finish()
    assert {house.reason(f"r{number}") for number in range(12)} == {"length"}


def started(policy, **fields):
    house = House(max_seqs=1, scheduling=Scheduling(policy=policy))
    house.submit("running", 20, 50)
    house.step(1)
    house.submit("long batch", 300, 90, Lane.BATCH, priority=0)
    house.clock.advance(0.01)
    house.submit("long chat", 300, 90, priority=1)
    house.clock.advance(0.01)
    house.submit("short chat", 20, 5, priority=2)
    house.finish()
    return sorted(("long batch", "long chat", "short chat"), key=lambda name: house.times[name][0])


def test_the_orders_of_the_policies():
    assert started("fcfs") == ["long batch", "long chat", "short chat"]
    assert started("sjf") == ["short chat", "long batch", "long chat"]
    assert started("priority") == ["long chat", "short chat", "long batch"]


@pytest.mark.parametrize(("scheduler", "wait"), [("static", 1.0), ("dynamic", 0.05)])
def test_batches_are_gathered_and_end_together(scheduler, wait):
    house = House(max_seqs=4, scheduling=Scheduling(scheduler=scheduler, policy="fcfs"))
    house.submit("first", 20, 40)
    house.submit("second", 200, 4)
    begun = house.clock.now
    house.run_until(lambda: house.state.running)
    assert house.clock.now - begun == pytest.approx(wait, abs=0.15)
    assert set(house.state.running) == {"first", "second"}
    house.submit("third", 20, 4)
    house.run_until(lambda: "first" in house.ends)
    assert "third" not in house.times
    house.finish()
    for number in range(4):
        house.submit(f"full{number}", 20, 4)
    house.step(2)
    assert all(f"full{number}" in house.times for number in range(4)), "a full batch waits for nobody"


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "random"},
        {"scheduler": "sometimes"},
        {"preemption": "never"},
        {"itl_stretch": 0.9},
        {"batch_floor": 1.5},
        {"checkpoint_pages": -1},
        {"min_chunk": 0},
    ],
)
def test_settings_out_of_range_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Scheduling(**wrong)


def test_goals_out_of_range_are_named():
    with pytest.raises(ValueError, match="ttft_s"):
        LaneGoals(ttft_s=0.0, itl_s=0.1)
    with pytest.raises(ValueError, match="attainment"):
        LaneGoals(ttft_s=1.0, itl_s=0.1, attainment=1.1)
    with pytest.raises(ValueError, match="host_pages"):
        CoreConfig(num_pages=10, host_pages=-1)
