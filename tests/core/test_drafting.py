"""The draft model: answers are the same with and without it, its pages come back, and it guesses where it pays."""

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.config import PREEMPTIONS, CoreConfig, LaneGoals, Scheduling
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Lane
from engine.core.messages.step import Drafted
from engine.core.plan import draft_asks, proposals
from engine.core.plan.draft_asks import MOST_CAUGHT_UP, PROBE_STEPS, Wanted
from engine.core.plan.proposals import MOST_DECODES
from engine.core.speculate.drafting import FIRST_DRAFTED, DraftCosts, Drafting, DraftPrices, DraftRecord, work_of
from engine.core.speculate.proposer import Guess, PromptLookup
from tests.core import virtual
from tests.core.memory import (
    arrivals,
    check_alike,
    configs,
    expected_tokens,
    make_engine,
    request,
    run,
    serve,
    tokens_of,
)
from tests.core.virtual import SteppedEngine
from tests.examples import examples

ROOMY = CoreConfig(
    num_pages=80, block_size=4, max_seqs=4, max_model_len=64, token_budget=64, speculation=True, draft_block=3
)
PASS, ROW = 0.002, 0.0002
"""Seconds that the draft model takes on the virtual clock."""


def everything(state, candidates, chooser, room):
    """Draft four tokens for every sequence, and let those that the draft model holds little of catch up by seven."""
    return [Wanted(one, min(7, one.missing), min(4, one.most)) for one in candidates]


def verify_all(state, guesses, budget, tokens):
    return {seq: len(guess.tokens) for seq, guess in guesses.items()}


@contextmanager
def always():
    """Context manager in which the engine drafts and verifies at any predicted cost."""
    verifies = patch.object(proposals, "_worthwhile", verify_all)
    with verifies, patch.object(draft_asks, "_worthwhile", everything), no_lookups():
        yield


def no_lookups():
    return patch.object(PromptLookup, "propose", lambda self, tokens, most: Guess())


@given(config=configs, arrivals=arrivals, draft_block=st.integers(1, 6), lookups=st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_answers_are_the_same_with_a_draft_model(config, arrivals, draft_block, lookups):
    """Whatever is accepted, preempted or aborted, and whatever else needs the pages."""
    plain, _ = serve(config, arrivals)
    with always():
        if lookups:
            PromptLookup.propose = lambda self, tokens, most: Guess(tuple(tokens[:most]), "prompt")
        events, counters = serve(replace(config, speculation=True, draft_block=draft_block), arrivals)
    assert counters.accepted_tokens <= counters.proposed_tokens
    check_alike(arrivals, plain, events)


@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_preempted_sequences_are_drafted_for_again(preemption):
    config = replace(
        ROOMY, num_pages=20, block_size=2, max_seqs=5, host_pages=40, scheduling=Scheduling(preemption=preemption)
    )
    asked = [(i * 3, [i, i + 1, 3], 18, None, Lane.BATCH if i % 2 else Lane.INTERACTIVE, True, None) for i in range(4)]
    with always():
        events, counters = serve(config, asked)
    assert counters.preemptions > 0
    assert 0 < counters.accepted_tokens < counters.proposed_tokens
    for number, (_, prompt, *_) in enumerate(asked):
        assert tokens_of(events, f"r{number}") == expected_tokens(request("r", prompt, seed=3), 18)


def test_several_tokens_come_with_a_step_and_are_counted():
    asked = request("r", range(5), 30, ignore_eos=True)
    with always():
        engine = make_engine(ROOMY)
        events = run(engine, asked)
    assert tokens_of(events, "r") == expected_tokens(asked, 30)
    [count] = events[-1].proposals
    assert (count.proposer, count.accepted) == ("draft", engine.state.counters.accepted_tokens)
    assert engine.state.counters.steps + count.accepted <= 32
    assert count.accepted > 15


def test_others_take_the_pages_before_anything_is_preempted():
    config = replace(ROOMY, num_pages=24, draft_block=2)
    with always():
        engine = make_engine(config)
        engine.inbox.put(Submit(request("first", range(16), 16, ignore_eos=True)))
        for _ in range(6):
            engine.step()
        seq = engine.state.sequences["first"]
        assert len(seq.speculation.drafting.pages) >= 8
        events = run(engine, request("second", range(20, 64), 10, ignore_eos=True))
    assert engine.state.counters.preemptions == 0
    assert tokens_of(events, "second") == expected_tokens(request("second", range(20, 64)), 10)
    rest = tokens_of(events, "first")
    assert rest == expected_tokens(request("first", range(16)), 16)[-len(rest) :]
    assert not seq.speculation.drafting.pages


def test_a_draft_model_leaves_a_reserve_of_pages():
    with always():
        engine = make_engine(replace(ROOMY, num_pages=20, prefix_caching=False))
        engine.inbox.put(Submit(request("r", range(44), 20, ignore_eos=True)))
        for _ in range(5):
            engine.step()
    assert 5 <= len(engine.state.sequences["r"].speculation.drafting.pages) <= 19 - 12 - 1


class DraftingEngine(SteppedEngine):
    """An engine on a virtual clock with a draft model, which takes the time that constants above say."""

    def __init__(self, right=True, **config):
        super().__init__(speculation=True, draft_block=64, **config)
        executor, compute = self.executor, self.executor.compute
        executor.step_seconds, executor.begin = executor.seconds, executor.device.begin
        executor.guess = executor.guess if right else lambda seq, count: [seq.tokens[-1]] * count

        def timed(plan):
            result = compute(plan)
            works = work_of([(one.num_computed, len(one.tokens)) for one in result.drafted])
            seconds = sum(count * price for count, price in zip(works, (PASS, ROW), strict=True))
            self.clock.advance(seconds)
            return replace(result, draft_seconds=seconds)

        executor.compute = timed
        with no_lookups():
            self.learn()
        self.began = len(executor.plans)

    def drafted(self):
        return [plan.drafts for plan in self.executor.plans[self.began :] if plan.chunks]


def test_one_stream_gets_several_tokens_a_step():
    with no_lookups():
        stepped = DraftingEngine()
        stepped.submit("r", 16, 300)
        stepped.finish()
    assert len(stepped.drafted()) < 150
    counters = stepped.state.counters
    assert counters.accepted_tokens > 0.6 * counters.proposed_tokens
    found = stepped.state.learned.drafts.costs.prices(DraftPrices(0, 0))
    assert (found.one_pass, found.row) == pytest.approx((PASS, ROW), rel=0.3)
    assert stepped.ledger.model.prices.decode == pytest.approx(virtual.DECODE, rel=0.1)
    predicted, actual = stepped.ledger.predicted_seconds, stepped.ledger.actual_seconds
    assert predicted == pytest.approx(actual, rel=0.1)


def test_a_draft_model_that_is_never_right_is_seldom_asked():
    with no_lookups():
        stepped = DraftingEngine(right=False)
        for number in range(4):
            stepped.submit(f"r{number}", 16, 400)
            stepped.finish()
    asked = stepped.drafted()
    assert sum(map(bool, asked)) < 0.05 * len(asked)


def test_a_slow_draft_model_is_asked_for_probes_only():
    with no_lookups(), patch(f"{__name__}.PASS", 0.02):
        stepped = DraftingEngine()
        stepped.submit("r", 16, 900)
        stepped.finish()
    asked = stepped.drafted()
    assert 1 <= sum(map(bool, asked)) <= 20 + PROBE_STEPS


def test_a_long_prompt_is_computed_in_parts_where_its_answer_is_long_enough():
    with no_lookups():
        stepped = DraftingEngine(num_pages=800, max_model_len=2048)
        stepped.submit("short", 900, 6)
        stepped.finish()
        assert not any(stepped.drafted())
        stepped.submit("long", 900, 200)
        stepped.finish()
    [first, *others] = [asks for asks in stepped.drafted() if asks]
    assert (first[0].most, first[0].guesses) == (MOST_CAUGHT_UP, 0)
    assert any(asks[0].guesses > 2 for asks in others)


def test_a_full_batch_drafts_nothing():
    with no_lookups():
        stepped = DraftingEngine()
        for number in range(MOST_DECODES + 1):
            stepped.submit(str(number), 16, 60)
        stepped.step(30)
    assert len(stepped.state.running) == MOST_DECODES + 1
    assert not any(stepped.drafted())


def test_nothing_is_drafted_for_batch_work_beside_interactive():
    with no_lookups(), patch(f"{__name__}.PASS", 0.0005):
        stepped = DraftingEngine()
        stepped.batch("batch", 16, 600)
        stepped.step(20)
        assert any(stepped.drafted())
        stepped.began = len(stepped.executor.plans)
        stepped.submit("now", 100, 400)
        stepped.step(30)
    assert {ask.request_id for asks in stepped.drafted() for ask in asks} == {"now"}


def test_drafting_leaves_every_token_in_time():
    with no_lookups():
        stepped = DraftingEngine(interactive=LaneGoals(ttft_s=0.5, itl_s=0.019))
        stepped.submit("r", 16, 100)
        stepped.finish()
    assert any(stepped.drafted())
    assert max(stepped.gaps("r")) < 0.019


def test_tenants_pay_for_drafts():
    with no_lookups():
        stepped = DraftingEngine()
        before = sum(stepped.ledger.busy.values()), stepped.clock.now
        stepped.submit("r", 16, 100)
        stepped.finish()
    assert any(stepped.drafted())
    assert sum(stepped.ledger.busy.values()) - before[0] == pytest.approx(stepped.clock.now - before[1], rel=0.01)


def test_guesses_that_are_right_leave_their_kv():
    drafting = Drafting(num_known=5)
    drafting.take(Drafted("r", 5, 7, (1, 2, 3)))
    drafting.follow([0] * 5 + [1, 9])
    assert (drafting.num_held, drafting.num_known, drafting.tokens) == (6, 7, ())
    drafting.take(Drafted("r", 1, 9, (1, 2, 3)))
    drafting.follow([0] * 5 + [1, 9, 1, 2, 3, 4])
    assert (drafting.num_held, drafting.num_known) == (9, 11)


def test_costs_are_learned_from_different_amounts_of_work():
    costs, first = DraftCosts(), DraftPrices(0.02, 0.004)
    assert tuple(costs.prices(first)) == pytest.approx(tuple(first), rel=1e-3)
    for _ in range(9):
        costs.observe([Drafted("r", 32, 32, ())], 0.042)  # it is all the same, and tells no pass from its rows
    assert costs.prices(first).seconds((1, 32)) == pytest.approx(0.042, rel=0.1)
    assert 0 < costs.prices(first).row < 0.004
    for number in range(99):
        one = Drafted("r", (1, 2, 2, 20)[number % 4], 0, (1,) * (number % 5))
        drafted = [one] * (1 + number % 3)
        passes, rows = work_of([(each.num_computed, len(each.tokens)) for each in drafted])
        costs.observe(drafted, 0.01 * passes + 0.001 * rows)
    assert tuple(costs.prices(first)) == pytest.approx((0.01, 0.001), rel=0.02)


def test_an_adapters_sequences_begin_with_what_its_last_ones_reached():
    record = DraftRecord()
    for _ in range(12):
        drafting = record.begin("x")
        record.end("x", drafting)  # it was not drafted for, and tells nothing
        drafting.acceptance, drafting.is_tried = 0.0, True
        record.end("x", drafting)
    assert record.begin("x").acceptance < 0.1
    assert record.begin("y").acceptance == FIRST_DRAFTED
    for _ in range(200):
        record.begin("x")
    assert record.begin("x").acceptance > 0.7
