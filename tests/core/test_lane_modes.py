"""Lanes that an operator pauses or drains, and requests that are cancelled: in the engine, where it is decided."""

import pytest

from engine.core.check import leftovers, violations
from engine.core.config import BATCH_GOALS, LaneGoals, Scheduling
from engine.core.lane_modes import cancel, set_goals, set_mode
from engine.core.types import FinishReason, Lane, LaneMode
from tests.core.virtual import House


def settle(house, question):
    return house.engine.inspect(question)


def mode(house, lane, mode):
    settle(house, lambda state: set_mode(state, lane, mode))


def test_nothing_of_a_paused_lane_starts_and_the_other_goes_on():
    house = House()
    house.batch("running", out=40)
    house.step(3)
    mode(house, Lane.BATCH, LaneMode.PAUSED)
    house.batch("waits")
    house.submit("chat", out=10)
    house.run_until(lambda: {"running", "chat"} <= house.ends.keys())
    house.step(50)
    assert "waits" not in house.times
    assert [seq.id for seq in house.state.waiting] == ["waits"]
    assert violations(house.state) == []
    mode(house, Lane.BATCH, LaneMode.OPEN)
    house.finish()
    assert len(house.times["waits"]) == 200


def test_what_a_lane_promises_holds_for_what_comes_from_then_on():
    house = House()
    house.submit("early")
    house.step()
    settle(house, lambda state: set_goals(state, Lane.INTERACTIVE, LaneGoals(9.0, 3.0, 0.5)))
    house.submit("late")
    house.step()
    assert house.state.config.goals == (LaneGoals(9.0, 3.0, 0.5), BATCH_GOALS)
    assert house.state.sequences["late"].due - house.clock.now > 1.0
    house.finish()


def steps_of_a_prompt(backlog):
    """Of an interactive one beside chats that decode, with so much batch work that waits in a paused lane."""
    house = House(num_pages=4000, max_model_len=2048, token_budget=2048)
    house.learn()
    mode(house, Lane.BATCH, LaneMode.PAUSED)
    for number in range(backlog):
        house.batch(f"waits-{number}", deadline=house.clock.now + 60)
    for number in range(6):
        house.submit(f"chat-{number}", out=400)
    house.step(50)
    house.submit("long", prompt=1500, out=1)
    house.run_until(lambda: "long" in house.ends)
    assert (house.ledger.batch_share, house.ledger.need) == (1.0, 0.0), "nobody is owed what he may not have"
    return sum(chunk.request_id == "long" for plan in house.executor.plans for chunk in plan.chunks)


def test_interactive_work_beside_a_paused_batch_lane_is_as_by_itself():
    assert steps_of_a_prompt(backlog=40) == steps_of_a_prompt(backlog=0)


def test_an_engine_whose_lane_is_paused_sleeps():
    house = House()
    mode(house, Lane.BATCH, LaneMode.PAUSED)
    house.batch("waits", out=5)
    house.step(3)
    assert house.state.sequences and not house.state.has_work
    mode(house, Lane.BATCH, LaneMode.OPEN)
    house.finish()
    assert house.reason("waits") == "length"


def test_adapters_are_not_read_for_a_paused_lane():
    house = House(adapters={"a": 3}, host_adapter_bytes=0)
    mode(house, Lane.BATCH, LaneMode.PAUSED)
    house.batch("waits", adapter_hash="a")
    house.step(20)
    assert not any(plan.fetches for plan in house.executor.plans)


def test_a_draining_lane_takes_nothing_new_and_ends_what_it_has():
    house = House(max_seqs=1)
    house.batch("running", out=30)
    house.batch("waiting", out=30)
    house.step(2)
    mode(house, Lane.BATCH, LaneMode.DRAINING)
    house.batch("late")
    house.submit("chat", out=5)
    house.finish()
    assert house.reason("late") == "lane_queue_full"
    assert house.ends["late"].refusal.retry_after > 0
    assert {house.reason(name) for name in ("running", "waiting", "chat")} == {"length"}


def test_cancelling_ends_a_request_once_wherever_it_is():
    house = House(max_seqs=1)
    for name in ("running", "waiting", "other"):
        house.batch(name, out=50)
    house.step(3)
    assert settle(house, lambda state: cancel(state, ["running", "running", "waiting", "nobody"])) == 2
    assert settle(house, lambda state: cancel(state, ["running"])) == 0
    house.finish()
    for name in ("running", "waiting"):
        assert house.ends[name].finish_reason is FinishReason.ERROR
        assert house.ends[name].refusal.code.name == "CANCELLED"
    assert house.reason("other") == "length"
    assert violations(house.state) + leftovers(house.state) == []


def test_preemptions_are_counted_by_lane():
    house = House(num_pages=24, max_seqs=8)
    for number in range(3):
        house.batch(f"b{number}", prompt=64, out=100)
    house.step(5)
    house.submit("chat", prompt=200, out=60)
    house.finish()
    counted = house.state.counters.preempted_in
    assert counted[Lane.BATCH] > 0 and counted[Lane.INTERACTIVE] == 0
    assert sum(counted.values()) == house.state.counters.preemptions


def test_one_queue_for_all_has_no_lane_to_stop():
    house = House(scheduling=Scheduling(policy="fcfs"))
    with pytest.raises(ValueError, match="one queue"):
        mode(house, Lane.BATCH, LaneMode.PAUSED)
