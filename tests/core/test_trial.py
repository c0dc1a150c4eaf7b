"""Requests that may have crashed an engine are computed in steps of their own until they are cleared."""

from engine.core.config import CoreConfig
from engine.core.messages.commands import Submit
from engine.core.messages.requests import ErrorCode, FinishReason, Lane, LaneMode
from engine.core.state.sequence import TRIAL_TOKENS
from tests.core.memory import expected_tokens, make_engine, request, run_all, tokens_of
from tests.core.virtual import SteppedEngine

CONFIG = CoreConfig(num_pages=200, block_size=4, max_seqs=8, max_model_len=128, token_budget=64)


def suspect(name, produced=0, lane=Lane.INTERACTIVE, max_tokens=20):
    one = request(name, [3, 1, 4], max_tokens, lane, ignore_eos=True)
    return one._replace(produced=tuple(expected_tokens(one, produced)), moves=1, suspect=True)


def steps_of(stepped, requests):
    for each in requests:
        stepped.engine.inbox.put(Submit(each))
    while stepped.state.has_work or stepped.engine.inbox._commands:
        stepped.engine.step()
    return [[chunk.request_id for chunk in plan.chunks] for plan in stepped.executor.plans if plan.chunks]


def test_an_answer_goes_on_behind_the_tokens_that_another_engine_produced():
    engine = make_engine(CONFIG)
    whole = request("r", [3, 1, 4], 20, ignore_eos=True)
    moved = whole._replace(produced=tuple(expected_tokens(whole, 7)), moves=1)
    assert tokens_of(run_all(engine, [moved]), "r") == expected_tokens(whole, 20)[7:]


def test_suspects_are_computed_one_after_the_other_and_alone_until_they_are_cleared():
    stepped = SteppedEngine()
    others = [request(f"o{i}", [i, 2], 30, ignore_eos=True) for i in range(3)]
    suspects = [suspect("s0", 5), suspect("s1", 0, Lane.BATCH)]
    steps = steps_of(stepped, [*others, *suspects])
    for name in ("s0", "s1"):
        own = [step for step in steps if name in step]
        assert own[:TRIAL_TOKENS] == [[name]] * TRIAL_TOKENS
        assert any(len(step) > 1 for step in own[TRIAL_TOKENS:]), "a cleared suspect is never batched"
    first, second = (next(i for i, step in enumerate(steps) if name in step) for name in ("s0", "s1"))
    assert second >= first + TRIAL_TOKENS


def test_a_step_planned_ahead_leaves_a_suspect_alone():
    stepped = SteppedEngine(overlaps=True)
    steps = steps_of(stepped, [request("o", [1, 2], 40, ignore_eos=True), suspect("s", 2)])
    own = [index for index, step in enumerate(steps) if "s" in step]
    assert all(step == ["s"] for step in steps[own[0] : own[TRIAL_TOKENS - 1] + 1])


def test_a_suspect_that_cannot_start_holds_up_nothing():
    engine = make_engine(CONFIG)
    engine.state.waiting.modes[Lane.BATCH] = LaneMode.PAUSED
    engine.inbox.put(Submit(suspect("s", lane=Lane.BATCH)))
    engine.inbox.put(Submit(request("o", [1, 2], 6, ignore_eos=True)))
    events = [event for _ in range(10) for event in engine.step()]
    assert len(tokens_of(events, "o")) == 6
    assert tokens_of(events, "s") == []


def test_a_request_that_an_engine_had_is_not_turned_away_by_the_next():
    engine = make_engine(CONFIG)
    engine.state.waiting.modes[Lane.INTERACTIVE] = LaneMode.DRAINING
    moved = request("moved", [3, 1, 4], 4, ignore_eos=True)._replace(moves=1)
    events = run_all(engine, [moved, request("new", [3, 1, 4], 4)])
    assert len(tokens_of(events, "moved")) == 4
    (refused,) = [event for event in events if event.request_id == "new"]
    assert refused.refusal.code is ErrorCode.LANE_QUEUE_FULL


def test_an_answer_that_is_complete_already_is_refused():
    engine = make_engine(CONFIG)
    (event,) = run_all(engine, [suspect("s", 20, max_tokens=20)])
    assert event.finish_reason is FinishReason.ERROR
    assert event.refusal.code is ErrorCode.INVALID_REQUEST
