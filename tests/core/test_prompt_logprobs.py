"""Requests for logprobs of their prompts in the scheduling core: every prompt token is scored exactly once, however its
rows were planned, and pages of a cached prefix are not reused in place of rows that must be computed."""

from dataclasses import replace
from random import Random

import pytest

from engine.core.config import CoreConfig, LaneGoals, Scheduling
from engine.core.messages.commands import Abort, Submit
from engine.core.messages.features import StepFeatures
from engine.core.messages.prompt_logprobs import MOST_ALTERNATIVES, unpack
from engine.core.messages.requests import ErrorCode, FinishReason, Lane, Pooling
from engine.core.watch.check import leftovers, violations
from engine.executor.fake import fake_row
from tests.core.memory import added, expected_tokens, make_engine, request, run_all, tokens_of

CONFIG = CoreConfig(num_pages=60, block_size=4, max_seqs=6, max_model_len=64, token_budget=16)


def scored(name, prompt, max_tokens=0, lane=Lane.INTERACTIVE, adapter_hash=None, width=2):
    return request(name, prompt, max_tokens, lane, adapter_hash, prompt_logprobs=width, ignore_eos=True)


def rows_of(events, name):
    return b"".join(event.prompt_logprobs for event in events if event.request_id == name)


def expected_rows(asked, first=0):
    prompt = list(asked.prompt_ids)
    rows = range(first, len(prompt) - 1)
    return b"".join(fake_row(asked.adapter_hash, prompt[: row + 2], asked.params.prompt_logprobs) for row in rows)


def cached_of(events, name):
    return max(event.num_cached for event in events if event.request_id == name)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
def test_each_token_after_the_first_is_scored_once_before_the_answer(length, max_tokens, overlaps):
    asked = scored("s", range(length), max_tokens, adapter_hash="a")
    engine = make_engine(CONFIG, overlaps=overlaps)
    events = run_all(engine, [asked, request("beside", range(20), 6, ignore_eos=True)])
    assert rows_of(events, "s") == expected_rows(asked)
    assert tokens_of(events, "s") == expected_tokens(asked, max_tokens)
    assert tokens_of(events, "beside") == expected_tokens(request("beside", range(20)), 6)
    ends = [event.finish_reason for event in events if event.request_id == "s" and event.finish_reason]
    assert ends == [FinishReason.LENGTH]
    assert not any(event.prompt_logprobs for event in events if event.tokens)
    assert leftovers(engine.state) == []


def test_a_cached_prefix_is_computed_again_and_what_was_computed_is_reused():
    engine = make_engine(CONFIG)
    run_all(engine, [request("first", range(33))])
    asked = scored("s", range(33))
    events = run_all(engine, [asked], {})
    assert (rows_of(events, "s"), cached_of(events, "s")) == (expected_rows(asked), 0)
    longer = scored("longer", range(50))
    assert rows_of(run_all(engine, [longer], {}), "longer") == expected_rows(longer)
    again = run_all(engine, [request("again", range(50))], {})
    assert cached_of(again, "again") == 48, "the pages of scored prompts are shared"


def test_a_request_waits_for_no_page_that_another_one_computes():
    engine = make_engine(CONFIG)
    asked = [scored(f"s{number}", range(30), lane=Lane(number % 2)) for number in range(4)]
    events = run_all(engine, asked)
    assert all(rows_of(events, one.id) == expected_rows(one) for one in asked)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap", "checkpoint"])
def test_after_a_preemption_only_missing_rows_are_computed(preemption, overlaps):
    rules = Scheduling(preemption=preemption, hold_s=300.0)
    config = CoreConfig(
        num_pages=30, block_size=4, max_seqs=6, max_model_len=64, token_budget=8, host_pages=40, scheduling=rules
    )
    engine = make_engine(config, overlaps=overlaps)
    batch = [scored(f"b{number}", range(number, 50 + number), 4, Lane.BATCH) for number in range(2)]
    for one in batch:
        engine.inbox.put(Submit(one))
    events = []
    while not any(event.prompt_logprobs for event in events):
        events += engine.step()
    events += run_all(engine, [request(f"now {n}", [n] * 40, 8, ignore_eos=True) for n in range(2)], {})
    assert engine.state.counters.preemptions > 0
    for one in batch:
        assert rows_of(events, one.id) == expected_rows(one)
        assert tokens_of(events, one.id) == expected_tokens(one, 4)
    assert leftovers(engine.state) == [] and violations(engine.state) == []


def test_an_engine_continues_after_the_rows_that_another_has_sent():
    engine = make_engine(CONFIG)
    run_all(engine, [request("first", range(40))])
    moved = scored("s", range(40))._replace(num_scored=21, moves=1)
    events = run_all(engine, [moved], {})
    assert rows_of(events, "s") == expected_rows(moved, 21)
    assert cached_of(events, "s") == 20


def test_an_abort_in_the_middle_leaves_nothing():
    engine = make_engine(CONFIG, overlaps=True)
    engine.inbox.put(Submit(scored("s", range(60))))
    engine.step()
    engine.step()
    engine.inbox.put(Abort("s"))
    events = [event for _ in range(4) for event in engine.step()]
    assert [event.finish_reason for event in events if event.finish_reason] == [FinishReason.ABORT]
    assert leftovers(engine.state) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pooling": Pooling()}, "prompt_logprobs"),
        ({"num_scored": 5}, "num_scored"),
        ({"num_scored": -1}, "num_scored"),
        ({"params": scored("", ()).params._replace(prompt_logprobs=MOST_ALTERNATIVES + 1)}, "prompt_logprobs"),
        ({"params": scored("", ()).params._replace(prompt_logprobs=-1)}, "prompt_logprobs"),
        ({"params": scored("", ()).params._replace(max_tokens=-1)}, "max_tokens"),
    ],
)
def test_values_that_cannot_be_are_refused(changes, field):
    [event] = run_all(make_engine(CONFIG), [scored("x", range(5))._replace(**changes)])
    assert (event.refusal.code, event.refusal.message) == (ErrorCode.INVALID_REQUEST, f"{field} is out of range")


def test_rows_are_read_as_they_were_packed():
    [row] = unpack(fake_row(None, [3, 5], 2), 2)
    assert row.rank == 1
    assert [token for token, _ in row.values.top] == [5, 6]
    assert row.values.top[0][1] == pytest.approx(row.values.logprob)
    assert list(unpack(b"", 20)) == []


def test_a_chunk_that_ends_before_the_last_token_may_end_the_request():
    """The last token's row predicts nothing that is wanted, so no step has to compute it."""
    engine = make_engine(CONFIG)
    engine.inbox.put(added("a"))
    asked = scored("s", range(17), adapter_hash="a")
    engine.inbox.put(Submit(asked))
    events = engine.step() + engine.step()
    assert rows_of(events, "s") == expected_rows(asked)
    assert not engine.state.sequences


def test_the_time_that_scoring_takes_is_learned_and_planned():
    """A step of scored prompts takes twice as long, so that half as many of their tokens fit beside a decode."""
    config = replace(CONFIG, token_budget=512, max_model_len=4096, num_pages=4000, interactive=LaneGoals(1.0, 0.05))
    engine = make_engine(config)
    model, sizes, rng = engine.state.ledger.model, [], Random(0)
    for _ in range(600):
        prompt, decodes, is_scored = rng.randrange(2, 500), rng.randrange(1, 20), rng.random() < 0.5
        features = StepFeatures(prompt, decodes, scored_tokens=prompt * is_scored)
        model.observe(features, 0.005 + 1e-4 * (prompt + decodes + prompt * is_scored))
    for width in (None, 1):
        engine.inbox.put(Submit(request("decode", range(3), 30, ignore_eos=True)))
        while engine.state.steps.in_flight is None or "decode" not in engine.state.running:
            engine.step()
        engine.inbox.put(Submit(request("s", range(2000), 1, prompt_logprobs=width)))
        engine.step()
        plan = engine.state.steps.in_flight
        sizes += [chunk.num_tokens for chunk in plan.chunks if chunk.request_id == "s"]
        assert plan.forecast.features.scored_tokens == (sizes[-1] if width else 0)
        engine.inbox.put(Abort("s"))
        engine.inbox.put(Abort("decode"))
        run_all(engine, [], {})
    plain, asked = sizes
    assert 100 < asked < 0.6 * plain
