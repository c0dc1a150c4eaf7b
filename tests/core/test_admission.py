"""Requests that are turned away, with what reason and what Retry-After; and settings out of range."""

import pytest

from engine.core.config import CoreConfig, LaneGoals, Scheduling
from engine.core.messages.requests import Pooling, Request, SamplingParams
from tests.core.virtual import SteppedEngine

PATIENT = LaneGoals(ttft_s=0.5, itl_s=0.1, max_wait_s=1.0)


def refusal(stepped, name):
    return stepped.ends[name].refusal


@pytest.mark.slow
def test_a_wait_beyond_the_promise_is_refused_with_the_true_wait():
    stepped = SteppedEngine(max_seqs=2, interactive=PATIENT)
    stepped.learn()
    for number in range(40):
        stepped.submit(f"r{number}", 100, 60)
    stepped.step(1)
    refused = [name for name in stepped.ends if name.startswith("r") and stepped.reason(name) == "queue_timeout"]
    taken = [f"r{number}" for number in range(40) if f"r{number}" not in refused]
    assert refused and taken and refused == [f"r{number}" for number in range(len(taken), 40)]
    retry = refusal(stepped, refused[-1]).retry_after
    start = stepped.clock.now
    stepped.run_until(lambda: stepped.clock.now >= start + retry)
    stepped.submit("again", 100, 60)
    stepped.step(1)
    assert "again" not in stepped.ends, "who asks again after Retry-After is taken"
    stepped.finish()
    waits = [stepped.times[name][0] - start for name in taken]
    assert 0.4 < max(waits) < 2.5, "and the wait was about what was promised"


def test_a_deadline_that_cannot_be_met_is_said_at_once():
    stepped = SteppedEngine(max_seqs=4)
    stepped.learn()
    for number in range(50):
        stepped.batch(f"b{number}", deadline=stepped.clock.now + 1000.0)
    stepped.step(10)
    stepped.batch("never", deadline=stepped.clock.now + 1000.5)
    stepped.step(1)
    assert "never" not in stepped.ends
    for number in range(50):
        stepped.batch(f"early{number}", deadline=stepped.clock.now + 3.0)
        stepped.step(1)
    reasons = {stepped.reason(name) for name in stepped.ends if name.startswith("early")}
    assert reasons == {"queue_timeout"}
    assert all(refusal(stepped, name).retry_after > 0 for name in stepped.ends if name.startswith("early"))


@pytest.mark.slow
def test_a_full_queue_sends_the_last_of_the_lower_lane_away():
    stepped = SteppedEngine(max_seqs=1, max_waiting=3)
    stepped.submit("running", 20, 200)
    stepped.step(1)
    for number in range(3):
        stepped.batch(f"b{number}")
    stepped.submit("chat", 20, 2)
    stepped.step(1)
    assert stepped.reason("b2") == "lane_queue_full" and refusal(stepped, "b2").retry_after >= 1.0
    stepped.batch("b3")
    stepped.step(1)
    assert stepped.reason("b3") == "lane_queue_full"
    stepped.finish()
    assert {stepped.reason(name) for name in ("running", "chat", "b0", "b1")} == {"length"}


def test_a_full_queue_takes_one_request_of_a_tenant_that_has_nothing_waiting():
    stepped = SteppedEngine(max_seqs=1, max_waiting=3)
    for number in range(5):
        stepped.submit(f"greedy{number}", 20, 200, tenant="greedy", weight=1000.0)
    for number in range(2):
        stepped.submit(f"other{number}", 20, 2, tenant="other")
    stepped.step(1)
    assert sorted(stepped.ends) == ["greedy3", "greedy4", "other1"]
    assert {stepped.reason(name) for name in stepped.ends} == {"lane_queue_full"}


def test_a_full_queue_takes_an_answer_that_has_begun():
    stepped = SteppedEngine(max_seqs=1, max_waiting=2)
    for number in range(3):
        stepped.submit(f"r{number}", 20, 8)
        stepped.step(1)
    params = SamplingParams(8, ignore_eos=True)
    for name, produced in (("begun", (5, 6)), ("moved", ())):
        stepped.send(Request(name, (1, 2, 3), params, produced=produced, moves=1))
    stepped.step(1)
    assert {name: stepped.reason(name) for name in stepped.ends} == {"moved": "lane_queue_full"}
    stepped.finish()
    assert (stepped.reason("begun"), len(stepped.times["begun"])) == ("length", 6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 0.0},
        {"weight": float("nan")},
        {"weight": 1e-310},
        {"deadline": float("nan")},
        {"itl": float("nan")},
        {"out": 0},
    ],
)
def test_figures_that_would_upset_the_books_are_refused(wrong):
    stepped = SteppedEngine()
    stepped.batch("wrong", **{"out": 4} | wrong)
    stepped.step(1)
    assert stepped.reason("wrong") == "invalid_request"


@pytest.mark.slow
def test_an_idle_hour_is_not_held_against_the_batch_lane():
    stepped = SteppedEngine(max_seqs=2)
    stepped.learn()
    for number in range(30):
        stepped.submit(f"chat{number}", 20, 30)
        stepped.step(20)
    stepped.finish()
    stepped.clock.advance(3600.0)
    for number in range(20):
        stepped.batch(f"b{number}", 32, 20, deadline=stepped.clock.now + 60.0)
    stepped.finish()
    assert {stepped.reason(f"b{number}") for number in range(20)} == {"length"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"preemption": "never"},
        {"itl_stretch": 0.9},
        {"batch_floor": 1.5},
        {"checkpoint_pages": -1},
        {"min_chunk": 0},
    ],
)
def test_settings_out_of_range_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Scheduling(**wrong)


def test_goals_out_of_range_are_named():
    with pytest.raises(ValueError, match="ttft_s"):
        LaneGoals(ttft_s=0.0, itl_s=0.1)
    with pytest.raises(ValueError, match="attainment"):
        LaneGoals(ttft_s=1.0, itl_s=0.1, attainment=1.1)
    with pytest.raises(ValueError, match="host_pages"):
        CoreConfig(num_pages=10, host_pages=-1)


@pytest.mark.parametrize(
    ("field", "fields", "params"),
    [
        ("the prompt", {"prompt_ids": (1, 100)}, {}),
        ("the prompt", {"prompt_ids": (-1, 1)}, {}),
        ("produced", {"produced": (100,)}, {}),
        ("prediction", {"prediction": (5, 100)}, {}),
        ("stop_token_ids", {}, {"stop_token_ids": (2**31,)}),
        ("logit_bias", {}, {"logit_bias": ((100, 1.0),)}),
    ],
)
def test_tokens_that_the_model_has_no_rows_for_are_refused_by_the_engine(field, fields, params):
    """An id beyond the rows of the embedding would end the engine process, also if a template put it there."""
    stepped = SteppedEngine(vocab_size=100)
    request = Request("beyond", (1, 2, 99), SamplingParams(8, **params))._replace(**fields)
    stepped.send(request)
    stepped.send(Request("within", (1, 2, 99), SamplingParams(1), prediction=(99,)))
    stepped.step(2)
    assert stepped.reason("beyond") == "invalid_request"
    assert refusal(stepped, "beyond").message.startswith(f"{field} has token ids")
    stepped.finish()
    assert stepped.reason("within") in ("length", "stop")


def test_a_model_without_a_head_gives_vectors_only():
    stepped = SteppedEngine(pools_only=True)
    stepped.send(Request("answer", (1, 2), SamplingParams(8)))
    stepped.send(Request("vector", (1, 2), SamplingParams(0), pooling=Pooling()))
    stepped.step(3)
    assert "has no head" in refusal(stepped, "answer").message
    assert stepped.reason("vector") != "invalid_request"
