"""Requests for vectors in the scheduling core: planned like prompts, and without KV in a cache unless they ask."""

import pytest

from engine.core.config import CoreConfig, Scheduling
from engine.core.messages.commands import Abort, Submit
from engine.core.messages.requests import ErrorCode, FinishReason, Lane, Pooling, PoolingKind, SamplingParams
from engine.core.watch.check import leftovers, violations
from engine.executor.fake import fake_vector
from tests.core.memory import added, make_engine, request, run_all

CONFIG = CoreConfig(num_pages=60, block_size=4, max_seqs=6, max_model_len=64, token_budget=16, prefix_caching=False)


def for_a_vector(name, prompt, lane=Lane.INTERACTIVE, adapter_hash=None, kind=PoolingKind.LAST):
    return request(name, prompt, 0, lane, adapter_hash)._replace(pooling=Pooling(kind))


def plans_of(engine, requests):
    """The chunks and admissions of every step."""
    for adapter_hash in ("a", "b"):
        engine.inbox.put(added(adapter_hash))
    for one in requests:
        engine.inbox.put(Submit(one))
    plans = []
    while engine.state.has_work or engine.inbox._commands:
        engine.step()
        plan = engine.state.steps.in_flight
        plans.append((plan.chunks, [(one.request_id, one.pages, one.adapter_hash) for one in plan.admitted]))
        assert violations(engine.state) == []
    assert leftovers(engine.state) == []
    return plans


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_vector_is_planned_like_an_answer_of_one_token(overlaps):
    """So lanes, budgets and tenants' shares treat it as they treat a prompt, and decodes beside it wait no longer."""
    lanes, adapters = (Lane.INTERACTIVE, Lane.BATCH), (None, "a", "b")

    def traffic(ask):
        chats = [request(f"chat {n}", range(9 + n), 12, lanes[n % 2], adapters[n % 3]) for n in range(4)]
        asked = [ask(f"ask {n}", range(3 + 7 * n), lanes[n // 2 % 2], adapters[n % 3]) for n in range(6)]
        return [*chats, *asked]

    vectors = plans_of(make_engine(CONFIG, overlaps=overlaps), traffic(for_a_vector))
    tokens = plans_of(
        make_engine(CONFIG, overlaps=overlaps),
        traffic(lambda name, prompt, lane, adapter_hash: request(name, prompt, 1, lane, adapter_hash)),
    )
    assert vectors == tokens
    assert any(chunk.request_id.startswith("ask") for chunks, _ in vectors for chunk in chunks)


@pytest.mark.parametrize("kind", PoolingKind)
def test_the_last_event_has_the_vector_and_nothing_is_generated(kind):
    engine = make_engine(CONFIG)
    events = run_all(engine, [for_a_vector("v", range(40), kind=kind)])
    assert [event.finish_reason for event in events] == [None, FinishReason.POOLED]
    assert events[-1].vector == fake_vector(None, Pooling(kind), list(range(40)))
    assert (engine.state.counters.generated_tokens, engine.state.counters.prompt_tokens) == (0, 40)


@pytest.mark.parametrize(
    ("pooling", "max_tokens"), [(Pooling(), 1), (None, 0), (Pooling(), -1)], ids=["vector", "answer", "negative"]
)
def test_a_vector_has_no_tokens_and_an_answer_some(pooling, max_tokens):
    asked = request("x", range(5))._replace(params=SamplingParams(max_tokens), pooling=pooling)
    [event] = run_all(make_engine(CONFIG), [asked])
    assert (event.refusal.code, event.refusal.message) == (ErrorCode.INVALID_REQUEST, "max_tokens is out of range")


@pytest.mark.parametrize("preemption", ["recompute", "swap", "checkpoint"])
def test_vectors_neither_find_nor_leave_pages(preemption):
    rules = Scheduling(preemption=preemption, hold_s=300.0)
    config = CoreConfig(
        num_pages=60, block_size=4, max_seqs=6, max_model_len=64, token_budget=16, host_pages=20, scheduling=rules
    )
    engine = make_engine(config)
    run_all(engine, [request("chat", range(24), 4)])
    cached, saved = set(engine.state.prefix.key_of), engine.state.counters.kv.saved
    vectors = [for_a_vector(f"v{n}", range(24), lane) for n, lane in enumerate((*Lane, *Lane))]
    events = run_all(engine, [*vectors, for_a_vector("other", range(50), Lane.BATCH)], adapters={})
    assert {event.num_cached for event in events} == {0}
    assert set(engine.state.prefix.key_of) == cached
    assert (engine.state.prefix.promised, engine.state.counters.kv.saved) == ({}, saved)
    [begun, *_] = run_all(engine, [request("again", range(24), 4)], adapters={})
    assert begun.num_cached == 20, "chats share as before"


@pytest.mark.parametrize(("kind", "found"), [(PoolingKind.MEAN, 0), (PoolingKind.LAST, 20)])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_vector_that_shares_pages_leaves_them_for_an_answer_and_a_mean_finds_none(kind, found, preemption):
    rules = Scheduling(preemption=preemption)
    engine = make_engine(
        CoreConfig(
            num_pages=60, block_size=4, max_seqs=6, max_model_len=64, token_budget=16, host_pages=20, scheduling=rules
        )
    )
    asking = for_a_vector("v", range(24))._replace(pooling=Pooling(kind, shares_pages=True))
    [first, *_] = run_all(engine, [asking], adapters={})
    [answer, *_] = run_all(engine, [request("answer", range(24), 4)], adapters={})
    [again, *_] = run_all(engine, [asking._replace(id="again")], adapters={})
    assert (first.num_cached, answer.num_cached, again.num_cached) == (0, 20, found)


def test_an_abort_after_the_last_chunk_was_planned_drops_the_vector():
    engine = make_engine(CONFIG, overlaps=True)
    engine.inbox.put(Submit(for_a_vector("v", range(5))))
    engine.step()
    engine.inbox.put(Abort("v"))
    events = [event for _ in range(4) for event in engine.step()]
    assert [event.finish_reason for event in events if event.finish_reason] == [FinishReason.ABORT]
    assert leftovers(engine.state) == []
