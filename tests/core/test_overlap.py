"""A step planned while another is computed: nothing is told twice, nothing is lost, and device time is the device's."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from engine.core.config import CoreConfig, LaneGoals
from engine.core.messages.commands import Abort, DropAdapter, Submit
from engine.core.messages.requests import FinishReason, Lane, Request, SamplingParams
from engine.core.plan.limits import Limits
from engine.core.watch.check import leftovers
from tests.core.memory import (
    added,
    arrivals,
    check_alike,
    configs,
    expected_tokens,
    make_engine,
    request,
    run_all,
    serve,
    told,
)
from tests.core.virtual import PLAN, PREFILL, STEP, SteppedEngine
from tests.examples import examples

ROOMY = CoreConfig(num_pages=60, block_size=4, max_seqs=4, max_model_len=64, token_budget=64, eos_token_ids=(7,))


def busy(**options):
    """Return an engine with more work than its pages and its host copies have room for."""
    stepped = SteppedEngine(num_pages=30, max_seqs=6, host_pages=40, eos_token_ids=tuple(range(200)), **options)
    stepped.executor.plan_seconds = PLAN
    for i in range(10):
        stepped.submit(f"r{i}", 20 + 3 * i, 40, Lane(i % 2), tenant=f"t{i % 3}")
        stepped.engine.inbox.put(Submit(Request(f"e{i}", (i, i + 1), SamplingParams(60), tenant=f"t{i % 3}")))
    return stepped


def chunks_of(stepped, name):
    return [chunk for plan in stepped.executor.plans for chunk in plan.chunks if chunk.request_id == name]


@given(config=configs, arrivals=arrivals)
@settings(max_examples=examples(40), deadline=None)
@pytest.mark.slow
def test_requests_are_answered_alike_behind_and_beside_the_device(config, arrivals):
    """Whatever is preempted, swapped, aborted, stopped by a token or waits for its adapter on either way."""
    (plain, _), (ahead, _) = (serve(config, arrivals, overlaps=overlaps) for overlaps in (False, True))
    check_alike(arrivals, plain, ahead)


def test_the_host_plans_while_the_device_computes():
    ends = {}
    for overlaps in (False, True):
        stepped = SteppedEngine(overlaps=overlaps)
        stepped.executor.plan_seconds = PLAN
        stepped.submit("r", 16, 50)
        stepped.finish()
        ends[overlaps] = stepped.times["r"][-1]
    steps = 50
    assert ends[False] == pytest.approx(sum(stepped.executor.took) + steps * PLAN)
    assert ends[True] == pytest.approx(sum(stepped.executor.took) + PLAN)


def test_a_pending_token_gives_the_next_one_all_of_its_time():
    stepped = SteppedEngine(overlaps=True, interactive=LaneGoals(ttft_s=0.001, itl_s=0.03))
    stepped.learn()
    stepped.submit("late", 16, 9)
    stepped.step()
    stepped.clock.advance(0.005)
    assert stepped.state.sequences["late"].num_pending == 1
    assert stepped.state.sequences["late"].due < stepped.clock.now
    assert Limits(stepped.state, stepped.clock.now, timed=True).slack == 0.03


def test_steps_are_known_by_what_the_device_took():
    stepped = SteppedEngine(overlaps=True)
    stepped.executor.plan_seconds = PLAN
    stepped.learn()
    assert stepped.ledger.model.prices.step == pytest.approx(STEP, rel=0.02)


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_second_of_the_device_is_charged_once(overlaps):
    """This includes results that are dropped because their request had already ended. A device that is asked to compute
    before it has anything else to do also counts the seconds until it gets the step."""
    stepped = busy(overlaps=overlaps)
    stepped.finish()
    assert stepped.state.counters.preemptions > 0
    stopped = [name for name, end in stepped.ends.items() if end.finish_reason is FinishReason.STOP]
    assert stopped
    measured = stepped.executor.measured if overlaps else [seconds + PLAN for seconds in stepped.executor.took]
    spent = sum(seconds for seconds, plan in zip(measured, stepped.executor.plans, strict=True) if plan.chunks)
    accounts = stepped.ledger.accounts.of.values()
    assert sum(stepped.ledger.busy.values()) == pytest.approx(spent)
    assert sum(account.seconds for account in accounts) == pytest.approx(spent)


def test_a_chunk_is_billed_though_its_sequence_is_preempted_before_its_result_is_there():
    stepped = SteppedEngine(overlaps=True, num_pages=12, max_seqs=4)
    stepped.batch("b", 100, 8, tenant="late")
    stepped.step()
    assert stepped.ledger.accounts.get(Lane.BATCH, "late").served == 0
    stepped.submit("i", 120, 2)
    stepped.step()
    assert stepped.state.sequences["b"].preempted.times == 1
    assert stepped.ledger.accounts.get(Lane.BATCH, "late").served == pytest.approx(stepped.executor.took[0])


def test_a_token_known_beforehand_to_be_the_last_is_followed_by_nothing():
    stepped = SteppedEngine(overlaps=True)
    stepped.submit("r", 16, 5)
    stepped.finish()
    assert [(chunk.start, chunk.num_tokens) for chunk in chunks_of(stepped, "r")] == [
        (0, 16),
        *((16 + i, 1) for i in range(4)),
    ]


def test_what_follows_a_stop_is_thrown_away():
    stepped = SteppedEngine(overlaps=True)
    prompt = (1, 2, 3)
    tokens = expected_tokens(Request("r", prompt, SamplingParams(9)), 9, 1000)
    params = SamplingParams(9, stop_token_ids=(tokens[3],))
    stepped.engine.inbox.put(Submit(Request("r", prompt, params)))
    stepped.finish()
    assert (len(stepped.times["r"]), stepped.reason("r")) == (tokens.index(tokens[3]) + 1, "stop")
    assert len(chunks_of(stepped, "r")) == len(stepped.times["r"]) + 1
    assert stepped.state.counters.generated_tokens == len(stepped.times["r"])
    assert leftovers(stepped.state) == []


def test_a_name_that_is_used_again_does_not_get_what_was_meant_for_another():
    engine = make_engine(ROOMY, overlaps=True)
    first, second = request("r", [1, 2, 3], 20, ignore_eos=True), request("r", [4, 5], 6, ignore_eos=True)
    engine.inbox.put(Submit(first))
    before = [event for _ in range(4) for event in engine.step()]
    engine.inbox.put(Abort("r"))
    engine.inbox.put(Submit(second))
    after = []
    while engine.state.has_work:
        after += engine.step()
    heard, reason = told(after[:1], "r")
    assert (heard, reason) == ([], FinishReason.ABORT)
    assert told(before, "r") == (expected_tokens(first, 3),)
    assert told(after[1:], "r") == (expected_tokens(second, 6), FinishReason.LENGTH)


def test_a_page_is_found_as_soon_as_its_tokens_are_known_and_no_sooner():
    engine = make_engine(replace(ROOMY, block_size=2), overlaps=True)
    r = request("r", [1, 2, 3], 9, ignore_eos=True)
    engine.inbox.put(Submit(r))
    for _ in range(8):
        engine.step()
        (seq,) = engine.state.running.values()
        assert len(seq.tokens) == seq.num_computed, "the step under way computes the newest token"
        assert len(engine.state.prefix.page_of) == len(seq.tokens) // 2
    again = Request("again", (*r.prompt_ids, *expected_tokens(r, 3)), SamplingParams(1, ignore_eos=True))
    events = run_all(engine, [again], {})
    assert next(event for event in events if event.tokens and event.request_id == "again").num_cached == 4


def test_an_adapter_is_known_until_nothing_under_way_reads_it():
    engine = make_engine(ROOMY, overlaps=True)
    engine.inbox.put(added("a"))
    engine.inbox.put(Submit(request("r", [1, 2], 30, adapter_hash="a", ignore_eos=True)))
    while not engine.state.running:
        engine.step()
    engine.step()
    engine.inbox.put(DropAdapter("a"))
    engine.inbox.put(Abort("r"))
    while "a" in engine.state.adapters:
        engine.step()
    (last,) = engine.state.steps.under_way
    assert last.plan.adapters.evicted == ("a",) and last.plan.chunks == ()
    while engine.state.has_work:
        engine.step()
    assert engine.executor.resident == {}


def test_a_request_whose_place_comes_free_only_by_a_result_starts_at_once():
    stepped = SteppedEngine(overlaps=True, max_seqs=1)
    stepped.submit("first", 16, 3)
    stepped.submit("second", 16, 1)
    stepped.finish()
    assert stepped.times["second"][0] - stepped.times["first"][-1] == pytest.approx(STEP + 16 * PREFILL)
