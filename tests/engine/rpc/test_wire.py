"""What crosses the wire between a gateway and an engine, there and back."""

import pytest

from engine.core.messages.grammar import Grammar, GrammarKind
from engine.core.messages.requests import (
    ErrorCode,
    FinishReason,
    Lane,
    Pooling,
    PoolingKind,
    Refusal,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from engine.pb import engine_pb2 as pb
from engine.rpc.wire import event_from_pb, event_to_pb, request_from_pb, request_to_pb

PARAMS = SamplingParams(
    9, seed=7, logit_bias=((3, -1.0),), stop_token_ids=(5,), ignore_eos=True, logprobs=2, speculates=False
)
PLAIN = Request("plain", (1, 2), SamplingParams())
FULL = Request(
    "full",
    (1, 2, 3),
    PARAMS,
    adapter_hash="f00d",
    lane=Lane.BATCH,
    priority=-4,
    tenant="acme",
    weight=2.5,
    arrival=100.0,
    deadline=130.0,
    ttft=0.25,
    itl=0.0625,
    cache_salt="s\u00e4lt",
    request_class="gold",
    class_weight=2.5,
    prediction=(7, 8),
)


def sent(message):
    """Through bytes, as over the wire."""
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("request_", [PLAIN, FULL], ids=lambda request: request.id)
def test_a_request_arrives_as_it_was_sent(request_):
    assert request_from_pb(sent(request_to_pb(request_)), request_.arrival) == request_


@pytest.mark.parametrize("kind", GrammarKind)
def test_a_grammar_arrives_as_it_was_sent(kind):
    request = Request("r", (1,), SamplingParams(grammar=Grammar(kind, "")))
    assert request_from_pb(sent(request_to_pb(request)), 0.0) == request


@pytest.mark.parametrize("pooling", [Pooling(), Pooling(PoolingKind.MEAN, 64, normalize=False, shares_pages=True)])
def test_a_request_for_a_vector_arrives_as_it_was_sent(pooling):
    request = Request("r", (1,), SamplingParams(max_tokens=0), pooling=pooling)
    assert request_from_pb(sent(request_to_pb(request)), 0.0) == request


@pytest.mark.parametrize("width", [0, 20])
def test_a_request_for_logprobs_of_its_prompt_arrives_as_it_was_sent(width):
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=0, prompt_logprobs=width), num_scored=2)
    assert request_from_pb(sent(request_to_pb(request)), 0.0) == request


def test_only_differences_of_times_cross_the_wire():
    message = sent(request_to_pb(FULL))
    assert message.deadline_seconds == 30.0
    assert request_from_pb(message, 5000.0).deadline == 5030.0
    assert request_from_pb(message, 5000.0).arrival == 5000.0


def test_a_sender_without_a_clock_counts_from_submission():
    message = request_to_pb(Request("r", (1,), SamplingParams(), deadline=30.0))
    assert request_from_pb(message, 5000.0).deadline == 5030.0


def test_a_deadline_that_has_passed_is_not_none():
    message = request_to_pb(Request("r", (1,), SamplingParams(), deadline=0.0))
    assert request_from_pb(sent(message), 50.0).deadline == 50.0


def test_a_submission_without_a_weight_weighs_one():
    assert request_from_pb(pb.Submit(request_id="r", prompt=[1]), 0.0).weight == 1.0


def refused(refusal):
    return TokenEvent("r", finish_reason=FinishReason.ERROR, refusal=refusal)


@pytest.mark.parametrize(
    "event",
    [
        TokenEvent("r", num_cached=3, wait=0.5, adapter_wait=0.25, device_seconds=0.125),
        TokenEvent("r", (4, 5), (TokenLogprobs(-1.0, ((4, -1.0),)), TokenLogprobs(-2.0)), FinishReason.LENGTH, 3),
        TokenEvent("r", finish_reason=FinishReason.POOLED, device_seconds=0.125, vector=bytes(range(16))),
        TokenEvent("r", device_seconds=0.125, prompt_logprobs=bytes(range(16))),
        TokenEvent("r", (4,), device_seconds=0.125, prompt_logprobs=bytes(range(16))),
        *[refused(Refusal(code, "because", 1.5)) for code in ErrorCode],
        refused(Refusal(ErrorCode.QUEUE_TIMEOUT, "never", None)),
        refused(Refusal(ErrorCode.LANE_QUEUE_FULL, "at once", 0.0)),
    ],
)
def test_an_event_arrives_as_it_was_sent(event):
    assert event_from_pb(sent(event_to_pb(event))) == event
