"""Predicted lengths of answers."""

import random

import pytest

from engine.core.messages.grammar import Grammar, GrammarKind
from engine.core.messages.requests import Lane, Request, SamplingParams
from engine.core.predict.answer_lengths import MOST_GROUPS, AnswerLengths


def ask(prompt=100, first=0, most=4096, guess=1000, params=None, **fields):
    params = params or SamplingParams(most)
    return Request("r", tuple(range(first, first + prompt)), params, expected_tokens=guess, **fields)


def taught(*answers):
    lengths = AnswerLengths()
    for request, tokens in answers:
        lengths.learn(request, tokens)
    return lengths


def test_without_answers_the_gateway_is_believed():
    assert AnswerLengths().expect(ask(guess=77)) == 77
    assert AnswerLengths().expect(ask(guess=None)) == 4096


def test_an_answer_that_only_its_maximum_ends_has_that_length():
    lengths = taught(*[(ask(guess=None, most=60), 5)] * 20)
    assert lengths.expect(ask(guess=None, most=60)) == 5
    assert lengths.expect(ask(guess=None, params=SamplingParams(60, ignore_eos=True))) == 60


def test_a_prediction_is_within_the_limits_of_its_request():
    lengths = taught(*[(ask(), 500)] * 20)
    assert lengths.expect(ask(most=20)) == 20
    assert lengths.expect(ask(params=SamplingParams(4096, min_tokens=700))) == 700
    assert lengths.expect(ask(produced=(1,) * 800)) == 801


GRAMMAR = Grammar(GrammarKind.REGEX, "[ab]*")


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "b"},
        {"adapter_hash": "x"},
        {"lane": Lane.BATCH},
        {"guess": None},
        {"prompt": 3000},
        {"params": SamplingParams(4096, grammar=GRAMMAR)},
        {"first": 5000},
    ],
)
def test_groups_differ_in_each_feature(other):
    """Two kinds of requests that differ in nothing else have answers of 20 and of 900 tokens."""
    lengths = taught(*[(ask(tenant="a"), 20), (ask(**{"tenant": "a"} | other), 900)] * 12)
    assert lengths.expect(ask(tenant="a")) < 300 < 600 < lengths.expect(ask(**{"tenant": "a"} | other))


def test_what_few_answers_say_is_mixed_with_what_more_general_groups_say():
    lengths = taught(*[(ask(tenant=f"t{number}"), 100) for number in range(50)], (ask(tenant="new"), 1000))
    once = lengths.expect(ask(tenant="new"))
    assert 100 < once < 800
    for _ in range(10):
        lengths.learn(ask(tenant="new"), 1000)
    assert once < lengths.expect(ask(tenant="new")) <= 1000
    assert lengths.expect(ask(tenant="never seen")) < once


def test_a_mean_follows_a_change():
    lengths = taught(*[(ask(), 1000)] * 200, *[(ask(), 10)] * 200)
    assert lengths.expect(ask()) < 150


def test_memory_is_bounded_whatever_tenants_send():
    lengths, rng = AnswerLengths(), random.Random(0)
    for number in range(MOST_GROUPS + 100):
        lengths.learn(ask(1 + number % 900, rng.randrange(1 << 30), tenant=f"t{number}"), number)
    assert max(map(len, lengths._levels)) == MOST_GROUPS
