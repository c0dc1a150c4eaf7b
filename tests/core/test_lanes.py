"""What the lanes promise, on a virtual clock: bounded steps, bounded stretch, a floor for batch, deadlines."""

from dataclasses import replace

import pytest

from engine.core.config import LaneGoals, Scheduling
from engine.core.messages.features import StepFeatures
from engine.core.messages.requests import Lane
from engine.core.plan.step_budget import StepBudget
from engine.core.policy.fair_order import fair_order
from tests.core.virtual import DECODE, PREFILL, STEP, SteppedEngine


def busy_engine(**config):
    """Return an engine that has learned what steps cost and has more batch work than it can do."""
    stepped = SteppedEngine(**config)
    stepped.learn()
    for number in range(60):
        stepped.batch(f"b{number}")
    stepped.step(40)
    return stepped


def batch_tokens(stepped):
    return sum(len(times) for name, times in stepped.times.items() if name.startswith("b"))


def test_a_step_of_batch_work_alone_is_bounded():
    stepped = busy_engine()
    took = [plan.forecast.seconds for plan in stepped.executor.plans[-30:]]
    assert max(took) <= 3.0 * (STEP + DECODE) * 1.1
    assert min(took) > 1.5 * (STEP + DECODE), "the bound is used"


def test_batch_work_alone_takes_longer_steps_the_longer_no_interactive_request_has_come():
    """A request that arrives waits at most for a hundredth of the time without one, until one arrives."""
    stepped = busy_engine(token_budget=2048, max_seqs=64)
    began = stepped.clock.now
    for number in range(400):
        stepped.batch(f"long{number}", 200, 4)
    longest = 0.0
    while stepped.clock.now < began + 12:
        quiet = stepped.clock.now - stepped.state.ledger.interactive_at
        stepped.step(1)
        longest = max(longest, took := stepped.executor.plans[-1].forecast.seconds)
        assert took <= 1.1 * max(3.0 * (STEP + DECODE), 0.01 * quiet)
    assert longest > 5.0 * (STEP + DECODE), "the time is used"
    stepped.submit("chat", 16, 2)
    stepped.run_until(lambda: "chat" in stepped.ends)
    stepped.step(5)
    assert max(plan.forecast.seconds for plan in stepped.executor.plans[-5:]) <= 3.0 * (STEP + DECODE) * 1.1


def test_the_bound_in_seconds_holds_on_a_slow_device():
    stepped = busy_engine(scheduling=Scheduling(yield_bound_s=0.02))
    assert max(plan.forecast.seconds for plan in stepped.executor.plans[-30:]) <= 0.02


def test_batch_work_stretches_interactive_decodes_by_no_more_than_it_may():
    stepped = busy_engine()
    stepped.submit("chat", 40, 60)
    stepped.run_until(lambda: "chat" in stepped.ends)
    alone = STEP + DECODE
    gaps = sorted(stepped.gaps("chat"))
    assert gaps[-3] <= 1.4 * alone * 1.15
    assert gaps[len(gaps) // 2] > 1.2 * alone, "and batch work does use what it may"


def lanes_of(plan, stepped):
    return {stepped.state.sequences[c.request_id].lane for c in plan.chunks if c.request_id in stepped.state.sequences}


def test_an_interactive_prompt_has_its_step_to_itself():
    stepped = busy_engine()
    stepped.submit("chat", 100, 2)
    found = stepped.clock.now
    stepped.run_until(lambda: "chat" in stepped.times)
    alone = STEP + PREFILL * 100
    assert stepped.times["chat"][0] - found <= alone * 1.01
    assert lanes_of(stepped.executor.plans[-1], stepped) == {Lane.INTERACTIVE}


def test_a_prompt_may_share_its_step_where_the_operator_lets_it():
    stepped = busy_engine(scheduling=Scheduling(ttft_stretch=1.3))
    stepped.submit("chat", 100, 2)
    stepped.step(1)
    assert lanes_of(stepped.executor.plans[-1], stepped) == {Lane.INTERACTIVE, Lane.BATCH}


def test_on_an_unknown_device_batch_work_begins_with_little():
    """Interactive work begins with all its tokens, because it does not depend on what the engine has learned."""
    stepped = SteppedEngine()
    for number in range(30):
        stepped.batch(f"b{number}")
    stepped.step(15)
    sizes = [sum(chunk.num_tokens for chunk in plan.chunks) for plan in stepped.executor.plans]
    assert all(size <= 16 * (number + 1) for number, size in enumerate(sizes))
    assert sizes[-1] > 100, "more step by step"
    fresh = SteppedEngine()
    fresh.submit("chat", 200, 2)
    fresh.step(1)
    assert fresh.executor.plans[-1].chunks[0].num_tokens == 200


@pytest.mark.slow
def test_prompts_that_batch_work_brought_together_are_not_felt_as_one_long_step():
    """Two prompts in one step would double the step's length for the chat, so they run in two steps."""
    steps = {}
    for beside_batch in (False, True):
        stepped = SteppedEngine(interactive=LaneGoals(ttft_s=5.0, itl_s=1.0))
        stepped.learn()
        for number in range(60 * beside_batch):
            stepped.batch(f"b{number}")
        stepped.submit("chat", 20, 400)
        for number in range(8):
            stepped.step(15)
            stepped.submit(f"prompt{number}", 100, 2)
        stepped.step(30)
        for name in ("left", "right"):
            stepped.submit(name, 100, 2)
        stepped.step(4)
        steps[beside_batch] = max(
            sum(chunk.num_tokens for chunk in plan.chunks if chunk.request_id in ("left", "right"))
            for plan in stepped.executor.plans[-4:]
        )
    assert steps[False] == 200
    assert steps[True] < 200


def test_no_request_sits_out_a_prompt_of_many_steps():
    stepped = SteppedEngine(num_pages=2000, max_model_len=8192)
    stepped.learn()
    stepped.submit("book", 6000, 4)
    stepped.step(3)
    for number in range(5):
        stepped.submit(f"question{number}", 100, 2)
        stepped.step(2)
    stepped.run_until(lambda: "book" in stepped.ends)
    book = stepped.times["book"][0]
    assert all(stepped.times[f"question{number}"][0] < book for number in range(5))
    assert all(stepped.times[f"question{number}"][0] - STEP * 30 < book - 0.5 for number in range(5))


def test_a_long_prompt_advances_with_one_token_to_spare():
    stepped = SteppedEngine(max_seqs=8, token_budget=8, num_pages=2000, max_model_len=8192)
    stepped.learn()
    for number in range(7):
        stepped.submit(f"chat{number}", 8, 400)
        stepped.step(3)
    stepped.submit("book", 200, 2)
    stepped.submit("waits", 8, 2)
    stepped.step(20)
    assert stepped.state.running["book"].num_computed > 10


def test_batch_rows_of_one_adapter_go_together():
    stepped = SteppedEngine(adapters=dict.fromkeys("abcd", 2), num_pages=4000, max_seqs=64)
    stepped.learn()
    for number in range(48):
        stepped.batch(f"b{number}", 40, 400, adapter_hash="abcd"[number % 4])
    stepped.step(60)
    stepped.submit("chat", 20, 60)
    stepped.step(20)
    few = [plan for plan in stepped.executor.plans[-15:] if 2 < len(plan.chunks) < 30]
    assert few, "there is no room for all beside a chat"
    owner = {seq.id: seq.request.adapter_hash for seq in stepped.state.sequences.values()}
    counts = [len({owner[c.request_id] for c in plan.chunks} - {None}) for plan in few]
    assert max(counts) <= 2


def test_a_prompt_is_cut_to_what_other_chats_can_wait_for():
    stepped = SteppedEngine(interactive=LaneGoals(ttft_s=5.0, itl_s=0.04))
    stepped.learn()
    stepped.submit("chat", 20, 100)
    stepped.step(3)
    stepped.submit("document", 900, 4)
    stepped.run_until(lambda: "document" in stepped.ends)
    assert max(stepped.gaps("chat")) <= 0.04
    assert len([p for p in stepped.executor.plans if any(c.request_id == "document" for c in p.chunks)]) > 10


def test_a_prompt_advances_a_page_a_step_even_when_tokens_are_late():
    stepped = SteppedEngine(interactive=LaneGoals(ttft_s=5.0, itl_s=0.001))
    stepped.learn()
    stepped.submit("chat", 20, 100)
    stepped.step(3)
    stepped.submit("document", 64, 2)
    stepped.step(4)
    chunks = [c.num_tokens for p in stepped.executor.plans[-4:] for c in p.chunks if c.request_id == "document"]
    assert chunks == [16, 16, 16, 16]


def test_a_request_may_ask_for_another_pace_within_bounds():
    stepped = SteppedEngine()
    stepped.submit("fast", 20, 4, itl=0.06)
    stepped.submit("greedy", 20, 4, itl=0.0, ttft=0.0)
    stepped.submit("slow", 20, 4, itl=2.0)
    arrived = stepped.clock.now
    stepped.step(1)
    due = {name: stepped.state.sequences[name].due - stepped.clock.now for name in ("fast", "greedy", "slow")}
    assert due == pytest.approx({"fast": 0.06, "greedy": 0.025, "slow": 2.0})
    stepped.submit("hurry", 20, 4, ttft=0.0)
    stepped.engine.step()
    assert arrived < stepped.clock.now


@pytest.mark.slow
def test_batch_work_gets_its_floor_beside_endless_chats():
    """Chats without a pause, which would rather share nothing at all."""
    rules = Scheduling(ttft_stretch=1.0, itl_stretch=1.0, tail_share=0.0, floor_window_s=2.0)
    shares = {}
    for floor in (0.0, 0.2):
        stepped = SteppedEngine(scheduling=Scheduling(**{**asdict_(rules), "batch_floor": floor}))
        stepped.learn()
        for number in range(20):
            stepped.batch(f"b{number}")
        before = stepped.ledger.busy[Lane.BATCH]
        start = stepped.clock.now
        for number in range(40):
            stepped.submit(f"chat{number}", 20, 30)
            stepped.step(25)
        shares[floor] = (stepped.ledger.busy[Lane.BATCH] - before) / (stepped.clock.now - start)
    assert shares[0.0] < 0.05
    assert 0.12 < shares[0.2] < 0.4


def asdict_(rules):
    return {name: getattr(rules, name) for name in rules.__dataclass_fields__}


@pytest.mark.slow
def test_batch_work_withdraws_from_steps_in_which_tokens_are_late():
    """A goal that a step without batch work meets, and one with as much as it might have does not."""
    rules = Scheduling(batch_floor=0.0, margin_ceiling=1.05, itl_stretch=3.0)
    stepped = busy_engine(interactive=LaneGoals(ttft_s=0.5, itl_s=0.0165, attainment=0.9), scheduling=rules)
    stepped.executor.surprise = 0.004
    stepped.submit("chat", 20, 400)
    stepped.step(10)
    assert stepped.ledger.courtesy.value < 0.5
    stepped.run_until(lambda: "chat" in stepped.ends)
    late = [gap > 0.0165 for gap in stepped.gaps("chat")]
    assert any(late), "it was tried"
    assert sum(late) < 0.2 * len(late)


def first_in_line(stepped):
    return next(iter(fair_order(stepped.state, Lane.BATCH, stepped.clock.now))).id


def test_pressing_deadlines_go_first():
    stepped = busy_engine()
    stepped.batch("relaxed", 64, 20, deadline=stepped.clock.now + 10_000)
    stepped.step(20)
    assert stepped.ledger.batch.need < 0.7
    assert first_in_line(stepped) not in ("relaxed", "urgent")
    stepped.batch("urgent", 64, 200, deadline=stepped.clock.now + 0.35)
    stepped.step(1)
    stepped.run_until(lambda: stepped.ledger.batch.need > 0.7, most=12)
    assert first_in_line(stepped) == "urgent"


@pytest.mark.slow
def test_deadlines_that_cannot_be_met_otherwise_get_a_bounded_share():
    """Beside chats that would share nothing, and get all the time they need."""
    rules = Scheduling(
        itl_stretch=1.0, ttft_stretch=1.0, tail_share=0.0, batch_floor=0.0, promoted_share=0.3, floor_window_s=1.0
    )
    shares = {}
    for deadline in (None, 6.0):
        stepped = SteppedEngine(scheduling=rules)
        stepped.learn()
        for number in range(30):
            stepped.batch(f"b{number}", deadline=deadline and stepped.clock.now + deadline)
        for number in range(4):
            stepped.submit(f"chat{number}", 20, 400)
        stepped.step(100)
        before, start = stepped.ledger.busy[Lane.BATCH], stepped.clock.now
        stepped.step(200)
        shares[deadline] = (stepped.ledger.busy[Lane.BATCH] - before) / (stepped.clock.now - start)
    assert shares[None] < 0.05
    assert 0.2 < shares[6.0] < 0.45


@pytest.mark.slow
def test_work_whose_deadline_has_passed_presses_no_more():
    stepped = busy_engine()
    stepped.batch("late", 64, 20, deadline=stepped.clock.now + 1.2)
    stepped.step(3)
    stepped.clock.advance(5.0)
    stepped.step(3)
    assert stepped.ledger.batch.need == 0.0
    stepped.finish()
    assert stepped.reason("late") == "length"


def test_a_long_prompt_of_batch_work_does_not_hold_up_its_decodes():
    stepped = busy_engine()
    before = batch_tokens(stepped)
    stepped.batch("long", 900, 4)
    stepped.step(30)
    assert batch_tokens(stepped) > before + 100


def test_batch_prompts_begin_beside_chats():
    """Decodes leave room for a few tokens a step and never for a page's worth."""
    stepped = SteppedEngine(scheduling=Scheduling(batch_floor=0.0))
    stepped.learn()
    stepped.submit("chat", 20, 700)
    stepped.step(5)
    for number in range(4):
        stepped.batch(f"b{number}", 64, 40)
    stepped.run_until(lambda: sum(name.startswith("b") for name in stepped.ends) == 4, most=800)
    assert "chat" not in stepped.ends


def test_batch_adapters_load_beside_chats():
    stepped = SteppedEngine({"large": 200}, batch=LaneGoals(3600.0, 60.0))
    stepped.executor.load_seconds = 0.05
    stepped.learn()
    for _ in range(20):
        stepped.ledger.model.observe(StepFeatures(decode_tokens=1.0, pages_moved=200.0), 0.06)
    stepped.submit("chat", 20, 900)
    stepped.step(5)
    stepped.batch("b", 32, 4, adapter_hash="large")
    stepped.run_until(lambda: "b" in stepped.ends, most=800)
    assert "chat" not in stepped.ends


@pytest.mark.slow
def test_a_goal_no_request_can_meet_does_not_stop_the_batch_lane():
    stepped = SteppedEngine(interactive=LaneGoals(ttft_s=0.5, itl_s=0.008), scheduling=Scheduling(floor_window_s=1.0))
    stepped.learn()
    for number in range(4):
        stepped.batch(f"b{number}", 64, 20)
    for number in range(60):
        stepped.submit(f"chat{number}", 20, 30, itl=0.0)
        stepped.step(20)
    assert batch_tokens(stepped) > 40


def test_the_floor_is_bounded_too():
    """No request decodes, so no token is due, but a request that has just arrived waits for the end of this step."""
    rules = Scheduling(batch_floor=1.0, yield_bound_s=0.05)
    stepped = busy_engine(scheduling=rules, token_budget=2048)
    stepped.submit("chat", 16, 2)
    stepped.step(1)
    assert stepped.executor.plans[-1].forecast.seconds <= 0.05


def test_what_is_not_started_is_not_counted():
    stepped = SteppedEngine({"a": 4}, token_budget=32, max_seqs=32)
    stepped.learn()
    stepped.batch("warm", 16, 100, adapter_hash="a")
    stepped.step(4)
    stepped.submit("chat", 32, 2)
    stepped.batch("more", 64, 4, adapter_hash="a")
    stepped.step(1)
    assert stepped.executor.plans[-1].forecast.features.adapters == 0


@pytest.mark.slow
def test_everything_ends_and_nothing_is_left():
    stepped = busy_engine(num_pages=200)
    for number in range(15):
        stepped.submit(f"chat{number}", 30, 20)
        stepped.step(7)
    stepped.finish()
    assert {stepped.reason(name) for name in stepped.ends} == {"length"}
    assert len(stepped.ends) == 60 + 15 + 26


def test_batch_work_begins_where_a_step_is_believed_to_take_no_time():
    """A starved machine had such prices: all steps were decodes with one adapter, to which the fit gave all cost."""
    stepped = SteppedEngine(adapters={"only": 2})
    stepped.learn()
    model = stepped.ledger.model
    model.prices = replace(model.prices, step=0.0, prefill=0.0, decode=0.0, adapter=0.02, beyond=(0.0, 0.0, 0.0))
    stepped.batch("b", adapter_hash="only")
    stepped.run_until(lambda: "b" in stepped.ends, most=2000)


def test_decodes_and_proposals_pay_for_the_experts_that_they_read():
    stepped = SteppedEngine(chosen_experts=0.1)
    stepped.learn()
    for number in range(12):
        stepped.batch(f"batch-{number}", 16, 200)
    stepped.step(9)
    stepped.submit("chat", 16, 200)
    stepped.run_until(lambda: len(stepped.state.running) > 6 and stepped.state.counters.steps % 2, 100)
    model = stepped.ledger.model
    model.prices = replace(model.prices, experts=0.05)
    budget = StepBudget(stepped.state, stepped.clock.now, timed=True)
    chat, *others = sorted(stepped.state.running.values(), key=lambda seq: seq.lane)
    budget.enter(Lane.INTERACTIVE)
    budget.grant(chat, chat.num_computed, 1)
    budget.enter(Lane.BATCH)
    granted = sum(budget.grant(seq, seq.num_computed, 1) for seq in others)
    assert 0 < granted < len(others)
    assert model.predict(budget.features) <= budget._time.allowed
    before, price = model.predict(budget.features), budget.row_price(chat, chat.num_computed + 2, 0)
    budget.add_proposals(chat, chat.num_computed + 1, 1)
    assert model.predict(budget.features) - before == pytest.approx(price)
