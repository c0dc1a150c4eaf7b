"""Requests whose max_tokens is only a ceiling: what they get is what fits, and the books go by what is expected."""

import pytest

from engine.core.commit.adapters import pin_adapter
from engine.core.config import LaneGoals
from engine.core.messages.requests import FinishReason, Lane, Request, SamplingParams
from engine.core.policy.preemption import cheapest_first
from engine.rpc.wire import request_from_pb, request_to_pb
from tests.core.virtual import SteppedEngine

PATIENT = LaneGoals(ttft_s=0.5, itl_s=0.1, max_wait_s=10.0)
CEILING = 8000


def small(**config):
    """An engine whose pool is as large as its context, as where `memory_gb` is small: 20 pages of 16 tokens."""
    return SteppedEngine({"a": 6, "pinned": 4}, num_pages=21, max_model_len=320, **config)


def test_a_ceiling_is_cut_to_what_an_adapter_leaves():
    stepped = small()
    stepped.submit("cut", 40, 280, adapter_hash="a", expected_tokens=50)
    stepped.submit("asked", 40, 280, adapter_hash="a")
    stepped.step()
    assert stepped.reason("asked") == "context_length_exceeded"
    stepped.finish()
    assert (stepped.reason("cut"), len(stepped.times["cut"])) == ("length", (20 - 6) * 16 - 40)


def test_a_ceiling_is_cut_to_what_pinned_adapters_leave():
    stepped = small()
    stepped.step()
    pin_adapter(stepped.state, "pinned", True)
    stepped.submit("base", 40, 280, expected_tokens=50)
    stepped.finish()
    assert (stepped.reason("base"), len(stepped.times["base"])) == ("length", (20 - 4) * 16 - 40)


@pytest.mark.parametrize(("prompt", "fits"), [(14 * 16 - 1, True), (14 * 16, False)])
def test_a_prompt_without_room_for_one_token_is_refused(prompt, fits):
    stepped = small()
    stepped.submit("long", prompt, 320 - prompt, adapter_hash="a", expected_tokens=50)
    stepped.finish()
    assert stepped.reason("long") == ("length" if fits else "context_length_exceeded")


def test_a_ceiling_is_never_cut_below_min_tokens():
    stepped = small()
    params = {"min_tokens": 200, "ignore_eos": True}
    stepped.send(Request("least", tuple(range(40)), SamplingParams(280, **params), "a", expected_tokens=9))
    stepped.step()
    assert stepped.reason("least") == "context_length_exceeded"


def test_a_ceiling_is_never_cut_below_what_an_earlier_engine_produced():
    stepped = small()
    for name, produced in (("goes on", 100), ("too long", 300)):
        params = SamplingParams(310, ignore_eos=True)
        request = Request(name, (1, 2), params, "a", produced=(5,) * produced, moves=1, expected_tokens=9)
        stepped.send(request)
    stepped.step()
    assert stepped.reason("too long") == "context_length_exceeded"
    assert stepped.state.sequences["goes on"].expected_length == 2 + 101
    stepped.finish()
    assert (stepped.reason("goes on"), len(stepped.times["goes on"])) == ("length", (20 - 6) * 16 - 2 - 100)


@pytest.mark.slow
def test_pinning_cuts_live_ceilings_and_leaves_room_for_the_expected():
    stepped = small()
    stepped.submit("live", 40, 280, expected_tokens=50)
    stepped.submit("waits", 40, 280, expected_tokens=50)
    stepped.step(3)
    pin_adapter(stepped.state, "pinned", True)
    stepped.finish()
    most = (20 - 4) * 16 - 40
    assert {len(stepped.times[name]) for name in ("live", "waits")} == {most}
    stepped.submit("long", 40, 216, expected_tokens=216)
    stepped.step()
    with pytest.raises(ValueError, match="too many for request long"):
        pin_adapter(stepped.state, "a", True)
    stepped.finish()


@pytest.mark.parametrize(("expected", "refused"), [(30, False), (None, True)])
def test_waits_are_predicted_from_what_is_expected(expected, refused):
    stepped = SteppedEngine(max_seqs=4, num_pages=40_000, max_model_len=10_000, interactive=PATIENT)
    stepped.learn()
    for number in range(12):
        stepped.submit(f"chat{number}", 40, CEILING, expected_tokens=expected)
    stepped.step()
    assert ("chat11" in stepped.ends and stepped.reason("chat11") == "queue_timeout") is refused


def test_what_is_expected_follows_the_answers_that_ended():
    stepped = SteppedEngine(num_pages=4000, max_model_len=10_000)
    for number in range(5):
        tokens = SamplingParams(CEILING, stop_token_ids=tuple(range(50_000)))
        stepped.send(Request(f"r{number}", (1, 2), tokens, expected_tokens=30))
    stepped.finish()
    assert {end.finish_reason for end in stepped.ends.values()} == {FinishReason.STOP}
    stepped.send(Request("next", (1, 2), SamplingParams(CEILING), expected_tokens=30))
    stepped.step()
    assert stepped.state.sequences["next"].forecast.output == 1


def test_the_fair_bound_goes_by_the_longest_answer_there_was():
    stepped = SteppedEngine(num_pages=4000, max_model_len=10_000)
    stepped.submit("open", 40, 20, expected_tokens=10)
    stepped.finish()
    assert stepped.ledger.token_prices.longest_output == 20


def test_an_answer_near_its_expected_end_is_spared():
    stepped = SteppedEngine(num_pages=4000, max_model_len=10_000)
    stepped.submit("nearly done", 20, 1000, expected_tokens=24)
    stepped.clock.advance(0.001)
    stepped.submit("begun", 20, 60)
    stepped.step(24)
    running = list(stepped.state.running.values())
    assert [seq.id for seq in cheapest_first(stepped.state, running)] == ["begun", "nearly done"]


def test_what_is_expected_crosses_the_wire():
    for expected in (None, 1, 77):
        request = Request("r", (1, 2), SamplingParams(9), lane=Lane.BATCH, expected_tokens=expected)
        assert request_from_pb(request_to_pb(request), 0.0).expected_tokens == expected
