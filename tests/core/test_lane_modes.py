"""Lanes that an operator pauses or drains, and requests that are cancelled: in the engine, where it is decided."""

from engine.core.commit.apply import cancel, set_goals, set_mode
from engine.core.config import BATCH_GOALS, LaneGoals
from engine.core.messages.requests import FinishReason, Lane, LaneMode
from engine.core.watch.check import leftovers, violations
from tests.core.virtual import SteppedEngine


def settle(stepped, question):
    return stepped.engine.inspect(question)


def mode(stepped, lane, mode):
    settle(stepped, lambda state: set_mode(state, lane, mode))


def test_nothing_of_a_paused_lane_starts_and_the_other_goes_on():
    stepped = SteppedEngine()
    stepped.batch("running", out=40)
    stepped.step(3)
    mode(stepped, Lane.BATCH, LaneMode.PAUSED)
    stepped.batch("waits")
    stepped.submit("chat", out=10)
    stepped.run_until(lambda: {"running", "chat"} <= stepped.ends.keys())
    stepped.step(50)
    assert "waits" not in stepped.times
    assert [seq.id for seq in stepped.state.waiting] == ["waits"]
    assert violations(stepped.state) == []
    mode(stepped, Lane.BATCH, LaneMode.OPEN)
    stepped.finish()
    assert len(stepped.times["waits"]) == 200


def test_what_a_lane_promises_holds_for_what_comes_from_then_on():
    stepped = SteppedEngine()
    stepped.submit("early")
    stepped.step()
    settle(stepped, lambda state: set_goals(state, Lane.INTERACTIVE, LaneGoals(9.0, 3.0, 0.5)))
    stepped.submit("late")
    stepped.step()
    assert stepped.state.config.goals == (LaneGoals(9.0, 3.0, 0.5), BATCH_GOALS)
    assert stepped.state.sequences["late"].due - stepped.clock.now > 1.0
    stepped.finish()


def steps_of_a_prompt(backlog):
    """Return how many steps an interactive prompt of 1,500 tokens takes beside chats that decode, while `backlog` batch
    requests wait in a paused lane."""
    stepped = SteppedEngine(num_pages=4000, max_model_len=2048, token_budget=2048)
    stepped.learn()
    mode(stepped, Lane.BATCH, LaneMode.PAUSED)
    for number in range(backlog):
        stepped.batch(f"waits-{number}", deadline=stepped.clock.now + 60)
    for number in range(6):
        stepped.submit(f"chat-{number}", out=400)
    stepped.step(50)
    stepped.submit("long", prompt=1500, out=1)
    stepped.run_until(lambda: "long" in stepped.ends)
    assert (stepped.ledger.batch.share, stepped.ledger.batch.need) == (1.0, 0.0), "a paused lane is owed nothing"
    return sum(chunk.request_id == "long" for plan in stepped.executor.plans for chunk in plan.chunks)


def test_interactive_work_beside_a_paused_batch_lane_is_as_by_itself():
    assert steps_of_a_prompt(backlog=40) == steps_of_a_prompt(backlog=0)


def test_an_engine_whose_lane_is_paused_sleeps():
    stepped = SteppedEngine()
    mode(stepped, Lane.BATCH, LaneMode.PAUSED)
    stepped.batch("waits", out=5)
    stepped.step(3)
    assert stepped.state.sequences and not stepped.state.has_work
    mode(stepped, Lane.BATCH, LaneMode.OPEN)
    stepped.finish()
    assert stepped.reason("waits") == "length"


def test_adapters_are_not_read_for_a_paused_lane():
    stepped = SteppedEngine(adapters={"a": 3}, host_adapter_bytes=0)
    mode(stepped, Lane.BATCH, LaneMode.PAUSED)
    stepped.batch("waits", adapter_hash="a")
    stepped.step(20)
    assert not any(plan.adapters.fetches for plan in stepped.executor.plans)


def test_a_draining_lane_takes_nothing_new_and_ends_what_it_has():
    stepped = SteppedEngine(max_seqs=1)
    stepped.batch("running", out=30)
    stepped.batch("waiting", out=30)
    stepped.step(2)
    mode(stepped, Lane.BATCH, LaneMode.DRAINING)
    stepped.batch("late")
    stepped.submit("chat", out=5)
    stepped.finish()
    assert stepped.reason("late") == "lane_queue_full"
    assert stepped.ends["late"].refusal.retry_after > 0
    assert {stepped.reason(name) for name in ("running", "waiting", "chat")} == {"length"}


def test_cancelling_ends_a_request_once_wherever_it_is():
    stepped = SteppedEngine(max_seqs=1)
    for name in ("running", "waiting", "other"):
        stepped.batch(name, out=50)
    stepped.step(3)
    assert settle(stepped, lambda state: cancel(state, ["running", "running", "waiting", "unknown"])) == 2
    assert settle(stepped, lambda state: cancel(state, ["running"])) == 0
    stepped.finish()
    for name in ("running", "waiting"):
        assert stepped.ends[name].finish_reason is FinishReason.ERROR
        assert stepped.ends[name].refusal.code.name == "CANCELLED"
    assert stepped.reason("other") == "length"
    assert violations(stepped.state) + leftovers(stepped.state) == []


def test_preemptions_are_counted_by_lane():
    stepped = SteppedEngine(num_pages=24, max_seqs=8)
    for number in range(3):
        stepped.batch(f"b{number}", prompt=64, out=100)
    stepped.step(5)
    stepped.submit("chat", prompt=200, out=60)
    stepped.finish()
    counted = stepped.state.counters.preempted_in
    assert counted[Lane.BATCH] > 0 and counted[Lane.INTERACTIVE] == 0
    assert sum(counted.values()) == stepped.state.counters.preemptions
