"""What the lanes promise, on a virtual clock: bounded steps, bounded stretch, a floor for batch, deadlines."""

from dataclasses import replace

import pytest

from engine.core.config import LaneGoals, Scheduling
from engine.core.fair_order import fair_order
from engine.core.step_time import StepFeatures
from engine.core.types import Lane
from tests.core.virtual import DECODE, PREFILL, STEP, House


def busy_house(**config):
    """One that knows what steps take and has more batch work than it can do."""
    house = House(**config)
    house.learn()
    for number in range(60):
        house.batch(f"b{number}")
    house.step(40)
    return house


def batch_tokens(house):
    return sum(len(times) for name, times in house.times.items() if name.startswith("b"))


def test_a_step_of_batch_work_alone_is_bounded():
    house = busy_house()
    took = [plan.predicted for plan in house.executor.plans[-30:]]
    assert max(took) <= 3.0 * (STEP + DECODE) * 1.1
    assert min(took) > 1.5 * (STEP + DECODE), "the bound is used"


def test_the_bound_in_seconds_holds_on_a_slow_device():
    house = busy_house(scheduling=Scheduling(yield_bound_s=0.02))
    assert max(plan.predicted for plan in house.executor.plans[-30:]) <= 0.02


def test_batch_work_stretches_interactive_decodes_by_no_more_than_it_may():
    house = busy_house()
    house.submit("chat", 40, 60)
    house.run_until(lambda: "chat" in house.ends)
    alone = STEP + DECODE
    gaps = sorted(house.gaps("chat"))
    assert gaps[-3] <= 1.4 * alone * 1.15
    assert gaps[len(gaps) // 2] > 1.2 * alone, "and batch work does use what it may"


def lanes_of(plan, house):
    return {house.state.sequences[c.request_id].lane for c in plan.chunks if c.request_id in house.state.sequences}


def test_an_interactive_prompt_has_its_step_to_itself():
    house = busy_house()
    house.submit("chat", 100, 2)
    found = house.clock.now
    house.run_until(lambda: "chat" in house.times)
    alone = STEP + PREFILL * 100
    assert house.times["chat"][0] - found <= alone * 1.01
    assert lanes_of(house.executor.plans[-1], house) == {Lane.INTERACTIVE}


def test_a_prompt_may_share_its_step_where_the_operator_lets_it():
    house = busy_house(scheduling=Scheduling(ttft_stretch=1.3))
    house.submit("chat", 100, 2)
    house.step(1)
    assert lanes_of(house.executor.plans[-1], house) == {Lane.INTERACTIVE, Lane.BATCH}


def test_on_an_unknown_device_batch_work_begins_with_little():
    """And interactive work with all it wants: it has to know nothing to go first."""
    house = House()
    for number in range(30):
        house.batch(f"b{number}")
    house.step(15)
    sizes = [sum(chunk.num_tokens for chunk in plan.chunks) for plan in house.executor.plans]
    assert all(size <= 16 * (number + 1) for number, size in enumerate(sizes))
    assert sizes[-1] > 100, "more step by step"
    fresh = House()
    fresh.submit("chat", 200, 2)
    fresh.step(1)
    assert fresh.executor.plans[-1].chunks[0].num_tokens == 200


def test_prompts_that_batch_work_brought_together_are_not_felt_as_one_long_step():
    """Two at once would be twice as long a step as the chat has known; one after the other is not."""
    steps = {}
    for beside_batch in (False, True):
        house = House(interactive=LaneGoals(ttft_s=5.0, itl_s=1.0))
        house.learn()
        for number in range(60 * beside_batch):
            house.batch(f"b{number}")
        house.submit("chat", 20, 400)
        for number in range(8):
            house.step(15)
            house.submit(f"prompt{number}", 100, 2)
        house.step(30)
        for name in ("left", "right"):
            house.submit(name, 100, 2)
        house.step(4)
        steps[beside_batch] = max(
            sum(chunk.num_tokens for chunk in plan.chunks if chunk.request_id in ("left", "right"))
            for plan in house.executor.plans[-4:]
        )
    assert steps[False] == 200
    assert steps[True] < 200


def test_nobody_sits_out_a_prompt_of_many_steps():
    house = House(num_pages=2000, max_model_len=8192)
    house.learn()
    house.submit("book", 6000, 4)
    house.step(3)
    for number in range(5):
        house.submit(f"question{number}", 100, 2)
        house.step(2)
    house.run_until(lambda: "book" in house.ends)
    book = house.times["book"][0]
    assert all(house.times[f"question{number}"][0] < book for number in range(5))
    assert all(house.times[f"question{number}"][0] - STEP * 30 < book - 0.5 for number in range(5))


def test_a_long_prompt_advances_with_one_token_to_spare():
    house = House(max_seqs=8, token_budget=8, num_pages=2000, max_model_len=8192)
    house.learn()
    for number in range(7):
        house.submit(f"chat{number}", 8, 400)
        house.step(3)
    house.submit("book", 200, 2)
    house.submit("waits", 8, 2)
    house.step(20)
    assert house.state.running["book"].num_computed > 10


def test_batch_rows_of_one_adapter_go_together():
    house = House(adapters=dict.fromkeys("abcd", 2), num_pages=4000, max_seqs=64)
    house.learn()
    for number in range(48):
        house.batch(f"b{number}", 40, 400, adapter_hash="abcd"[number % 4])
    house.step(60)
    house.submit("chat", 20, 60)
    house.step(20)
    few = [plan for plan in house.executor.plans[-15:] if 2 < len(plan.chunks) < 30]
    assert few, "there is no room for all beside a chat"
    owner = {seq.id: seq.request.adapter_hash for seq in house.state.sequences.values()}
    counts = [len({owner[c.request_id] for c in plan.chunks} - {None}) for plan in few]
    assert max(counts) <= 2


def test_a_prompt_is_cut_to_what_other_chats_can_wait_for():
    house = House(interactive=LaneGoals(ttft_s=5.0, itl_s=0.04))
    house.learn()
    house.submit("chat", 20, 100)
    house.step(3)
    house.submit("document", 900, 4)
    house.run_until(lambda: "document" in house.ends)
    assert max(house.gaps("chat")) <= 0.04
    assert len([p for p in house.executor.plans if any(c.request_id == "document" for c in p.chunks)]) > 10


def test_a_prompt_advances_a_page_a_step_even_when_tokens_are_late():
    house = House(interactive=LaneGoals(ttft_s=5.0, itl_s=0.001))
    house.learn()
    house.submit("chat", 20, 100)
    house.step(3)
    house.submit("document", 64, 2)
    house.step(4)
    chunks = [c.num_tokens for p in house.executor.plans[-4:] for c in p.chunks if c.request_id == "document"]
    assert chunks == [16, 16, 16, 16]


def test_a_request_may_ask_for_another_pace_within_bounds():
    house = House()
    house.submit("fast", 20, 4, itl=0.06)
    house.submit("greedy", 20, 4, itl=0.0, ttft=0.0)
    house.submit("slow", 20, 4, itl=2.0)
    arrived = house.clock.now
    house.step(1)
    due = {name: house.state.sequences[name].due - house.clock.now for name in ("fast", "greedy", "slow")}
    assert due == pytest.approx({"fast": 0.06, "greedy": 0.025, "slow": 2.0})
    house.submit("hurry", 20, 4, ttft=0.0)
    house.engine.step()
    assert arrived < house.clock.now


def test_batch_work_gets_its_floor_beside_endless_chats():
    """Chats without a pause, which would rather share nothing at all."""
    rules = Scheduling(ttft_stretch=1.0, itl_stretch=1.0, tail_share=0.0, floor_window_s=2.0)
    shares = {}
    for floor in (0.0, 0.2):
        house = House(scheduling=Scheduling(**{**asdict_(rules), "batch_floor": floor}))
        house.learn()
        for number in range(20):
            house.batch(f"b{number}")
        before = house.ledger.busy[Lane.BATCH]
        start = house.clock.now
        for number in range(40):
            house.submit(f"chat{number}", 20, 30)
            house.step(25)
        shares[floor] = (house.ledger.busy[Lane.BATCH] - before) / (house.clock.now - start)
    assert shares[0.0] < 0.05
    assert 0.12 < shares[0.2] < 0.4


def asdict_(rules):
    return {name: getattr(rules, name) for name in rules.__dataclass_fields__}


def test_batch_work_withdraws_from_steps_in_which_tokens_are_late():
    """A goal that a step without batch work meets, and one with as much as it might have does not."""
    rules = Scheduling(batch_floor=0.0, margin_ceiling=1.05, itl_stretch=3.0)
    house = busy_house(interactive=LaneGoals(ttft_s=0.5, itl_s=0.0165, attainment=0.9), scheduling=rules)
    house.executor.surprise = 0.004
    house.submit("chat", 20, 400)
    house.step(10)
    assert house.ledger.courtesy < 0.5
    house.run_until(lambda: "chat" in house.ends)
    late = [gap > 0.0165 for gap in house.gaps("chat")]
    assert any(late), "it was tried"
    assert sum(late) < 0.2 * len(late)


def first_in_line(house):
    return next(iter(fair_order(house.state, Lane.BATCH, house.clock.now))).id


def test_pressing_deadlines_go_first():
    house = busy_house()
    house.batch("relaxed", 64, 20, deadline=house.clock.now + 10_000)
    house.step(20)
    assert house.ledger.need < 0.7
    assert first_in_line(house) not in ("relaxed", "urgent")
    house.batch("urgent", 64, 200, deadline=house.clock.now + 0.35)
    house.step(1)
    house.run_until(lambda: house.ledger.need > 0.7, most=12)
    assert first_in_line(house) == "urgent"


def test_deadlines_that_cannot_be_met_otherwise_get_a_bounded_share():
    """Beside chats that would share nothing, and get all the time they need."""
    rules = Scheduling(
        itl_stretch=1.0, ttft_stretch=1.0, tail_share=0.0, batch_floor=0.0, promoted_share=0.3, floor_window_s=1.0
    )
    shares = {}
    for deadline in (None, 6.0):
        house = House(scheduling=rules)
        house.learn()
        for number in range(30):
            house.batch(f"b{number}", deadline=deadline and house.clock.now + deadline)
        for number in range(4):
            house.submit(f"chat{number}", 20, 400)
        house.step(100)
        before, start = house.ledger.busy[Lane.BATCH], house.clock.now
        house.step(200)
        shares[deadline] = (house.ledger.busy[Lane.BATCH] - before) / (house.clock.now - start)
    assert shares[None] < 0.05
    assert 0.2 < shares[6.0] < 0.45


def test_work_whose_deadline_has_passed_presses_no_more():
    house = busy_house()
    house.batch("late", 64, 20, deadline=house.clock.now + 1.2)
    house.step(3)
    house.clock.advance(5.0)
    house.step(3)
    assert house.ledger.need == 0.0
    house.finish()
    assert house.reason("late") == "length"


def test_a_long_prompt_of_batch_work_does_not_hold_up_its_decodes():
    house = busy_house()
    before = batch_tokens(house)
    house.batch("long", 900, 4)
    house.step(30)
    assert batch_tokens(house) > before + 100


def test_batch_prompts_begin_beside_chats():
    """Decodes leave room for a few tokens a step and never for a page's worth."""
    house = House(scheduling=Scheduling(batch_floor=0.0))
    house.learn()
    house.submit("chat", 20, 700)
    house.step(5)
    for number in range(4):
        house.batch(f"b{number}", 64, 40)
    house.run_until(lambda: sum(name.startswith("b") for name in house.ends) == 4, most=800)
    assert "chat" not in house.ends


def test_batch_adapters_load_beside_chats():
    house = House({"large": 200}, batch=LaneGoals(3600.0, 60.0))
    house.executor.load_seconds = 0.05
    house.learn()
    for _ in range(20):
        house.ledger.model.observe(StepFeatures(decode_tokens=1.0, pages_moved=200.0), 0.06)
    house.submit("chat", 20, 900)
    house.step(5)
    house.batch("b", 32, 4, adapter_hash="large")
    house.run_until(lambda: "b" in house.ends, most=800)
    assert "chat" not in house.ends


def test_a_goal_nobody_can_meet_does_not_stop_the_batch_lane():
    house = House(interactive=LaneGoals(ttft_s=0.5, itl_s=0.008), scheduling=Scheduling(floor_window_s=1.0))
    house.learn()
    for number in range(4):
        house.batch(f"b{number}", 64, 20)
    for number in range(60):
        house.submit(f"chat{number}", 20, 30, itl=0.0)
        house.step(20)
    assert batch_tokens(house) > 40


def test_the_floor_is_bounded_too():
    """Nobody decodes, so nobody's next token is due; but whoever has just come waits for this step."""
    rules = Scheduling(batch_floor=1.0, yield_bound_s=0.05)
    house = busy_house(scheduling=rules, token_budget=2048)
    house.submit("chat", 16, 2)
    house.step(1)
    assert house.executor.plans[-1].predicted <= 0.05


def test_what_is_not_started_is_not_counted():
    house = House({"a": 4}, token_budget=32, max_seqs=32)
    house.learn()
    house.batch("warm", 16, 100, adapter_hash="a")
    house.step(4)
    house.submit("chat", 32, 2)
    house.batch("more", 64, 4, adapter_hash="a")
    house.step(1)
    assert house.executor.plans[-1].features.adapters == 0


def test_everything_ends_and_nothing_is_left():
    house = busy_house(num_pages=200)
    for number in range(15):
        house.submit(f"chat{number}", 30, 20)
        house.step(7)
    house.finish()
    assert {house.reason(name) for name in house.ends} == {"length"}
    assert len(house.ends) == 60 + 15 + 26


def test_batch_work_begins_where_a_step_is_believed_to_take_no_time():
    """So it came to be on a starved machine: all steps had been decodes with one adapter, whose price was the whole."""
    house = House(adapters={"only": 2})
    house.learn()
    model = house.ledger.model
    model.prices = replace(model.prices, step=0.0, prefill=0.0, decode=0.0, adapter=0.02, beyond=(0.0, 0.0, 0.0))
    house.batch("b", adapter_hash="only")
    house.run_until(lambda: "b" in house.ends, most=2000)
