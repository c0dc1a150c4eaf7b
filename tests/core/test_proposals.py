"""Proposed tokens: answers are the same with and without, and steps have them where they pay."""

from contextlib import contextmanager
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.commit import apply
from engine.core.config import PREEMPTIONS, CoreConfig, LaneGoals, Scheduling
from engine.core.messages.commands import Submit
from engine.core.messages.grammar import Grammar, GrammarKind
from engine.core.messages.requests import FinishReason, Lane, Request, SamplingParams
from engine.core.messages.step import SampledToken
from engine.core.plan import proposals
from engine.core.plan.proposals import MOST_DECODES, proposer_for, verified
from engine.core.speculate.proposer import (
    LONGEST_REMEMBERED,
    MOST_CANDIDATES,
    MOST_MEMORIES,
    MOST_REMEMBERED,
    AnswerMemories,
    Guess,
    PromptLookup,
)
from engine.core.state.sequence import FIRST_ACCEPTANCE
from engine.executor.fake import fake_token
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
    told,
)
from tests.core.virtual import SteppedEngine
from tests.examples import examples

ROOMY = CoreConfig(num_pages=80, block_size=4, max_seqs=4, max_model_len=64, token_budget=64, speculation=True)


class Oracle:
    """A proposer that knows the fake executor's tokens and is right for a share of them."""

    def __init__(self, request, vocab_size, right):
        self.request, self.vocab_size, self.right = request, vocab_size, right

    def learn(self, tokens, most):
        pass

    def end(self, tokens):
        pass

    def propose(self, tokens, most):
        known, seed = list(tokens), self.request.params.seed
        for _ in range(most):
            token = fake_token(self.request.adapter_hash, seed, known, self.vocab_size)
            is_right = Random(f"{self.request.id} {len(known)}").random() < self.right
            known.append(token if is_right else token + 1)
        return Guess(tuple(known[len(tokens) :]), "oracle")


@contextmanager
def oracles(right, vocab_size=50, forced=True):
    """Let oracles propose; if `forced`, all of their proposals are computed, whatever they cost."""

    def oracle(*asked):
        return Oracle(asked[1], vocab_size, right) if proposer_for(*asked) else None

    def everything(state, guesses, budget, tokens):
        left, counts = budget.tokens_left, {}
        for seq, guess in guesses.items():
            counts[seq] = min(left, len(guess.tokens))
            left -= counts[seq]
        return {seq: count for seq, count in counts.items() if count}

    chooses = patch.object(proposals, "_worthwhile", everything if forced else proposals._worthwhile)
    with patch.object(apply, "proposer_for", oracle), chooses:
        yield


def forces(name, known):
    """Up to three tokens, some of which the model does not choose."""
    asked, count = request(name, (), seed=3), Random(f"{name} {len(known)}").randrange(4)
    return Oracle(asked, 50, 0.8).propose(known, count).tokens


@given(
    config=configs,
    arrivals=arrivals,
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    forces=st.sampled_from([None, forces]),
)
@settings(max_examples=examples(60), deadline=None)
def test_answers_are_the_same_with_proposals(config, arrivals, right, forces):
    """Whatever is forced, accepted, preempted, aborted, found in the prefix cache or stopped by a token in a chunk."""
    plain, _ = serve(config, arrivals)
    with oracles(right):
        events, counters = serve(replace(config, speculation=True), arrivals, forces=forces)
    assert counters.accepted_tokens <= counters.proposed_tokens
    check_alike(arrivals, plain, events)


@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_preempted_sequences_go_on_with_proposals(preemption):
    config = CoreConfig(
        num_pages=14,
        block_size=2,
        max_seqs=5,
        max_model_len=64,
        token_budget=40,
        host_pages=40,
        scheduling=Scheduling(preemption=preemption),
        speculation=True,
    )
    asked = [(i * 3, [i, i + 1, 3], 14, None, Lane.BATCH if i % 2 else Lane.INTERACTIVE, True, None) for i in range(4)]
    with oracles(0.7):
        events, counters = serve(config, asked)
    assert counters.preemptions > 0
    assert 0 < counters.accepted_tokens < counters.proposed_tokens
    for number, (_, prompt, *_) in enumerate(asked):
        assert tokens_of(events, f"r{number}") == expected_tokens(request("r", prompt, seed=3), 14)


def test_prefixes_consist_of_accepted_tokens():
    asked = request("first", range(9), 20, ignore_eos=True)
    with oracles(0.6):
        engine = make_engine(ROOMY)
        run(engine, asked)
        known = (*asked.prompt_ids, *expected_tokens(asked, 20))
        events = run(engine, request("again", known[:25], 8, ignore_eos=True))
    assert next(event for event in events if event.tokens).num_cached == 24
    assert tokens_of(events, "again") == expected_tokens(request("again", known[:25]), 8)


def test_forced_tokens_come_first_and_say_nothing_of_the_proposer():
    asked = request("r", range(5), 30, ignore_eos=True)

    def forces(name, known):
        return Oracle(asked, 50, 1.0).propose(known, 2).tokens

    with oracles(0.0):
        engine = make_engine(replace(ROOMY, max_model_len=128), forces=forces)
        engine.inbox.put(Submit(asked))
        events = [event for _ in range(6) for event in engine.step()]
        (seq,) = engine.state.running.values()
        assert seq.speculation.acceptance < 0.6 * FIRST_ACCEPTANCE  # the oracle's own proposals were refused
        refused, seq.speculation.proposer.propose = seq.speculation.acceptance, lambda tokens, most: Guess()
        events += engine.step()
        assert seq.speculation.acceptance == refused
        assert engine.state.counters.accepted_tokens == 2 * (engine.state.counters.steps - 1)
        events += run(engine)
    assert tokens_of(events, "r") == expected_tokens(asked, 30)


def test_a_chunk_ends_at_max_tokens_and_at_the_end_of_the_context():
    with oracles(1.0):
        engine = make_engine(ROOMY)
        events = run(engine, request("limit", range(5), 7, ignore_eos=True))
        assert told(events, "limit") == (expected_tokens(request("limit", range(5)), 7), FinishReason.LENGTH)
        assert engine.state.counters.steps <= 4
        assert engine.state.counters.accepted_tokens == 5
        events = run(engine, request("context", range(40), 24, ignore_eos=True))
        assert told(events, "context")[1] == FinishReason.LENGTH
        assert len(tokens_of(events, "context")) == 24


def test_tokens_after_a_stop_token_are_dropped():
    expected = expected_tokens(request("r", range(5)), 12)
    stop = next(token for number, token in enumerate(expected) if number >= 4 and token not in expected[:number])
    number = expected.index(stop)
    with oracles(1.0):
        engine = make_engine(ROOMY)
        events = run(engine, request("r", range(5), 20, stop_token_ids=(stop,)))
    assert told(events, "r") == (expected[: number + 1], FinishReason.STOP)
    assert engine.state.counters.generated_tokens == number + 1
    assert sum(event.finish_reason is not None for event in events) == 1


def test_proposals_take_no_page_that_holds_something():
    with oracles(1.0):
        engine = make_engine(replace(ROOMY, num_pages=7))
        run(engine, request("cached", range(16), 1))
        cached = dict(engine.state.prefix.key_of)
        engine.inbox.put(Submit(request("r", [40] * 5, 10, ignore_eos=True)))
        for _ in range(2):
            engine.step()
        assert cached.keys() <= engine.state.prefix.key_of.keys()
        assert len(engine.state.sequences["r"].pages) == 2
        assert engine.state.counters.accepted_tokens == 2


def stepped_engine(**config):
    stepped = SteppedEngine(speculation=True, **config)
    stepped.learn()
    return stepped


def proposed(stepped, since=0):
    return [
        sum(len(chunk.proposals) for chunk in plan.chunks) for plan in stepped.executor.plans[since:] if plan.chunks
    ]


def test_one_stream_gets_several_tokens_a_step():
    with oracles(1.0, 1000, forced=False):
        stepped = stepped_engine()
        began = len(stepped.executor.plans)
        stepped.submit("r", 16, 200)
        stepped.finish()
    counters = stepped.state.counters
    assert len(stepped.executor.plans) - began < 40
    assert len(stepped.times["r"]) == 200
    assert counters.accepted_tokens > 0.9 * counters.proposed_tokens
    assert stepped.ledger.model.prices.decode == pytest.approx(virtual.DECODE, rel=0.05)


def test_refused_proposals_become_rare():
    with oracles(0.0, 1000, forced=False):
        stepped = stepped_engine()
        began = len(stepped.executor.plans)
        stepped.submit("r", 16, 300)
        stepped.finish()
    assert stepped.state.counters.accepted_tokens == 0
    assert sum(proposed(stepped, began)[100:]) < 60


def test_nothing_is_proposed_where_a_row_costs_more_than_it_gains():
    """Only the probes remain, from which the model knows what rows cost."""
    with oracles(1.0, 1000, forced=False), patch.object(virtual, "DECODE", 0.05), patch.object(virtual, "STEP", 0.001):
        stepped = stepped_engine(interactive=LaneGoals(ttft_s=1000, itl_s=1000))
        began = len(stepped.executor.plans)
        for name in "abc":
            stepped.submit(name, 16, 100)
        stepped.finish()
    counts = proposed(stepped, began)
    assert sum(map(bool, counts)) <= len(counts) / 16


def test_a_full_batch_proposes_nothing():
    with oracles(1.0, 1000, forced=False):
        stepped = stepped_engine()
        for number in range(MOST_DECODES + 1):
            stepped.submit(str(number), 16, 60)
        stepped.step(10)
        began = len(stepped.executor.plans)
        stepped.step(20)
    assert len(stepped.state.running) == MOST_DECODES + 1
    assert proposed(stepped, began) == [0] * 20


def test_nothing_is_proposed_beside_prompts_nor_for_batch_work_beside_interactive():
    with oracles(1.0, 1000, forced=False):
        stepped = stepped_engine()
        stepped.batch("batch", 16, 400)
        stepped.step(20)
        assert any(proposed(stepped, -10))
        began = len(stepped.executor.plans)
        stepped.submit("now", 200, 800)
        stepped.step(20)
    for plan in stepped.executor.plans[began:]:
        names = {chunk.request_id for chunk in plan.chunks if chunk.proposals}
        is_prompt = any(not chunk.is_decode for chunk in plan.chunks)
        assert names <= {"now"}
        assert not (is_prompt and names)


def test_proposals_leave_every_token_in_time():
    with oracles(1.0, 1000, forced=False):
        stepped = stepped_engine(interactive=LaneGoals(ttft_s=0.5, itl_s=0.016))
        stepped.submit("r", 16, 100)
        stepped.finish()
    assert max(stepped.gaps("r")) < 0.016


@pytest.mark.parametrize(
    "changes",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"max_tokens": 1},
    ],
)
def test_requests_whose_rows_depend_on_one_another_get_no_proposals(changes):
    asked, memories = Request("r", (1,), SamplingParams()._replace(**changes)), AnswerMemories()
    assert proposer_for(ROOMY, asked, memories) is None
    assert proposer_for(ROOMY, Request("r", (1,), SamplingParams()), memories) is not None
    assert proposer_for(ROOMY, Request("r", (1,), SamplingParams(), suspect=True), memories) is None
    assert proposer_for(replace(ROOMY, speculation=False), Request("r", (1,), SamplingParams()), memories) is None


def lookup(tokens, most=4, pace=1000, num_prompt=None):
    proposer = PromptLookup(len(tokens) if num_prompt is None else num_prompt)
    for _ in range(-(-len(tokens) // pace)):
        proposer.learn(tokens, pace)
    return proposer.propose(tokens, most).tokens


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], ()),
        ([1], ()),
        ([1, 2, 3, 4], ()),
        ([1, 2, 3, 4, 9, 1, 2], (3, 4, 9, 1)),
        ([1, 2, 3, 7, 1, 2, 4, 8, 1, 2], (4, 8, 1, 2)),  # the latest of equal matches
        ([5, 1, 2, 3, 7, 6, 1, 2, 4, 8, 5, 1, 2], (3, 7, 6, 1)),  # a longer match before a later one
        ([1, 2, 1, 2, 1, 2], (1, 2, 1, 2)),
        ([3, 3], ()),
        ([3, 3, 3], (3, 3, 3, 3)),
    ],
)
def test_a_lookup_proposes_what_followed_the_longest_match(tokens, expected):
    assert lookup(tokens) == expected


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 7))
@settings(max_examples=examples(100), deadline=None)
def test_a_lookup_that_learns_by_and_by_proposes_the_same(tokens, pace):
    found = lookup(tokens, 8, pace)
    assert found == lookup(tokens, 8)
    assert len(found) in (0, 8)
    if found:
        places = [i for i in range(2, len(tokens)) if tokens[i - 2 : i] == tokens[-2:]]
        assert found[0] in {tokens[place] for place in places[-MOST_CANDIDATES:]}
    followed = lookup(tokens, 8, pace, num_prompt=0)
    assert followed == lookup(tokens, 8, num_prompt=0)
    assert len(followed) == 8 or not found


FILE = (10, 11, 5, 12, 13, 14, 5, 15, 16, 17, 5, 18, 19, 20)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((10, 11, 5), (12, 13, 14)),
        ((10, 11, 6), ()),  # a place is followed from its fourth token on
        ((12, 13, 14, 5, 15), (16, 17, 5)),
        ((10, 11, 5, 12, 9), (14, 5, 15)),  # one token is replaced
        ((10, 11, 5, 12, 9, 13), (14, 5, 15)),  # or inserted
        ((10, 11, 5, 12, 9, 8), ()),
        ((11, 5, 12, 13, 14, 6, 15), (16, 17, 6)),  # a name is changed from here on
        ((11, 5, 12, 13, 14, 6, 15, 16, 17, 5), (18, 19, 20)),
        ((11, 5, 12, 13, 7, 10, 11), (5, 12, 13)),  # a match elsewhere goes before a place that was just left
    ],
)
def test_a_lookup_follows_a_text_past_a_token_that_differs(answer, expected):
    proposer, tokens = PromptLookup(4 + len(FILE)), [1, 2, *FILE, 1, 3, *answer]
    proposer.learn(tokens, 1000)
    guess = proposer.propose(tokens, 3)
    assert guess.tokens == expected
    assert proposer.propose([*tokens, *expected[:1]], 2).tokens == expected[1:] or not expected


GUIDED = Request("r", (8, 9), SamplingParams(grammar=Grammar(GrammarKind.REGEX, "x")), tenant="acme")


def test_a_lookup_also_finds_longer_matches_in_answers_of_the_same_grammar():
    memories = AnswerMemories()
    PromptLookup(2, memories.of(GUIDED)).end([8, 9, 1, 2, 3, 4, 5, 6, 0])
    later = PromptLookup(3, memories.of(GUIDED))
    assert later.propose([7, 8, 9], 3) == Guess((1, 2, 3), "answers")
    known = [7, 8, 9, 2, 3, 50, 2, 3]
    later.learn(known, 100)
    assert later.propose(known, 2) == Guess((50, 2), "prompt")  # as long a match of its own
    known += [4, 5]
    later.learn(known, 100)
    assert later.propose(known, 9).tokens == (6, 0)
    assert PromptLookup().propose([7, 8, 9], 3) == Guess()
    text = list(memories.of(GUIDED).text)
    later.end([7, 8, 9])
    assert memories.of(GUIDED).text == text  # an end without an answer


@pytest.mark.parametrize(
    "other",
    [{"tenant": "globex"}, {"cache_salt": "s"}, {"adapter_hash": "x"}, {"params": SamplingParams()}],
    ids=lambda changes: next(iter(changes)),
)
def test_answers_are_remembered_for_requests_of_the_same_kind_only(other):
    memories = AnswerMemories()
    PromptLookup(2, memories.of(GUIDED)).end([8, 9, 1, 2])
    assert PromptLookup(2, memories.of(GUIDED._replace(**other))).propose([8, 9], 1) == Guess()
    assert PromptLookup(2, memories.of(GUIDED._replace(id="another"))).propose([8, 9], 1).tokens == (1,)


def test_memories_are_bounded():
    memories = AnswerMemories()
    memory = memories.of(GUIDED)
    for number in range(5):
        memory.add([number] * (MOST_REMEMBERED // 4 + 1))
        assert len(memory.text) <= MOST_REMEMBERED
    before = len(memory.text)
    memory.add(range(2 * MOST_REMEMBERED))
    assert len(memory.text) in (LONGEST_REMEMBERED, before + LONGEST_REMEMBERED)
    for number in range(MOST_MEMORIES):
        memories.of(GUIDED._replace(tenant=f"t{number}"))
    assert memories.of(GUIDED) is not memory


def test_a_prediction_is_accepted_where_the_answer_repeats_it():
    """The events count what came of it, up to the token that ends the answer."""
    wanted = expected_tokens(request("r", range(5)), 40)
    stop = next(token for number, token in enumerate(wanted) if number >= 30 and token not in wanted[:number])
    length = wanted.index(stop) + 1
    edited = (*wanted[:8], 99, 98, *wanted[9:20], *wanted[23:])
    params = {"ignore_eos": True, "stop_token_ids": (stop,)}
    asked = request("r", range(5), 60, **params)._replace(prediction=edited)
    with patch.object(proposals, "_worthwhile", compute_four):
        engine = make_engine(replace(ROOMY, max_model_len=128))
        events = run(engine, asked)
        assert tokens_of(events, "r") == wanted[:length]
        [count] = [one for one in events[-1].proposals if one.proposer == "prediction"]
        assert count.accepted >= 15 and count.proposed > count.accepted
        counts = [sum(one.accepted for one in event.proposals) for event in events]
        assert counts == sorted(counts) and counts[-1] == engine.state.counters.accepted_tokens
        assert engine.state.counters.steps <= length - counts[-1] + 1
        off = asked._replace(id="off", params=asked.params._replace(speculates=False))
        events = run(engine, off)
    assert tokens_of(events, "off") == expected_tokens(off, length)
    assert not any(event.proposals for event in events)


def compute_four(state, guesses, budget, tokens):
    return {seq: min(4, len(guess.tokens)) for seq, guess in guesses.items()}


def test_a_grammar_that_fails_takes_back_no_accepted_tokens():
    with oracles(1.0):
        engine = make_engine(ROOMY)
        engine.inbox.put(Submit(request("r", range(5), 50, ignore_eos=True)))
        engine.step()
        engine.step()
        accepted = engine.state.counters.accepted_tokens
        engine.executor.failing.add("r")
        events = run(engine)
    assert told(events, "r")[1] == FinishReason.ERROR
    assert engine.state.counters.accepted_tokens == accepted > 0
    assert engine.state.counters.proposed_tokens > accepted


def test_tokens_are_kept_up_to_the_first_refused_proposal():
    sampled = [SampledToken(name, token) for name, token in [("a", 1), ("b", 5), ("a", 2), ("a", 3), ("a", 4)]]
    assert [one.token for one in verified(sampled, {"a": (1, 2, 3)})] == [1, 5, 2, 3, 4]
    assert [one.token for one in verified(sampled, {"a": (1, 9, 3)})] == [1, 5, 2]
    assert [one.token for one in verified(sampled, {"a": (9, 2, 3)})] == [1, 5]
