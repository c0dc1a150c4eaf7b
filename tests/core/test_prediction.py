"""Predicted answers: the proposer follows the answer through the text that the caller expects."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.speculate.prediction import FAR, PREDICTION, Prediction
from engine.core.speculate.proposer import Guess, PromptLookup
from tests.examples import examples

FILE = tuple(range(100, 160))


def followed(prediction, answer, prompt=(1, 2), pace=1000):
    proposer, tokens = Prediction(prompt, tuple(prediction), PromptLookup(len(prompt))), list(prompt)
    proposer.learn(tokens, pace)
    for token in answer:
        tokens.append(token)
        proposer.learn(tokens, pace)
    return proposer, tokens


@pytest.mark.parametrize(
    ("answer", "following"),
    [
        ((), FILE[:3]),
        (FILE[:5], FILE[5:8]),
        ((*FILE[:5], 7), FILE[6:9]),  # one token is replaced
        ((*FILE[:5], 7, *FILE[6:8]), FILE[8:11]),
        ((*FILE[:5], 7, 8), None),
        ((*FILE[:5], 7, FILE[5]), FILE[6:9]),  # one token is inserted
        ((*FILE[:5], 7, 8, 9, *FILE[5:7]), FILE[7:10]),
        ((*FILE[:5], *FILE[9:11]), FILE[11:14]),  # a deletion
        ((*FILE[:20], *FILE[3:5]), FILE[5:8]),  # a part is written again
        ((*FILE[:5], *FILE[45:47]), None),  # far away, two tokens are not enough
        ((*FILE[:5], *FILE[45:48]), FILE[48:51]),
        ((7, 8, 9, *FILE[30:32]), FILE[32:35]),  # it begins later
        (FILE, None),
        ((*FILE, 7, FILE[-1], 8, 9), None),
    ],
)
def test_what_follows_an_edit(answer, following):
    proposer, tokens = followed(FILE, answer)
    guess = proposer.propose(tokens, 3)
    assert guess == (Guess(following, PREDICTION) if following else Guess())


def test_without_a_place_in_the_prediction_the_prompt_is_looked_up():
    proposer, tokens = followed(FILE, (50, 51, 52, 8, 9, 50, 51))
    assert proposer.propose(tokens, 2) == Guess((52, 8), "prompt")


def test_forced_tokens_are_followed_without_being_learned():
    proposer, tokens = followed(FILE, FILE[:4])
    assert proposer.propose([*tokens, *FILE[4:6]], 2) == Guess(FILE[6:8], PREDICTION)
    assert proposer.propose(tokens, 2) == Guess(FILE[4:6], PREDICTION)


def test_much_that_is_new_is_followed_by_and_by():
    """After a move from another engine process, all of the answer is new."""
    proposer = Prediction((1, 2), FILE, PromptLookup(2))
    tokens = [1, 2, *FILE[:40]]
    for _ in range(4):
        proposer.learn(tokens, 10)
    assert proposer.propose(tokens, 2) == Guess(FILE[40:42], PREDICTION)


def test_one_token_again_and_again_is_searched_in_linear_time():
    read = []

    class Text(tuple):
        __slots__ = ()

        def __getitem__(self, places):
            found = super().__getitem__(places)
            read.append(len(found) if isinstance(places, slice) else 1)
            return found

    proposer, tokens = Prediction((), Text((7,) * 4000), PromptLookup()), []
    for token in (7, 7, 1, 2, 7, 1, 2, 7):
        tokens.append(token)
        proposer.learn(tokens, 1)
    assert sum(read) < 8 * 10 * FAR


def test_a_token_that_is_replaced_is_proposed_replaced_until_it_is_not():
    file = (10, 5, 11, 12, 5, 13, 5, 14, 15)
    proposer, tokens = followed(file, (10, 6))
    assert proposer.propose(tokens, 3) == Guess((11, 12, 5), PREDICTION)
    proposer, tokens = followed(file, (10, 6, 11))
    assert proposer.propose(tokens, 3) == Guess((12, 6, 13), PREDICTION)
    proposer, tokens = followed(file, (10, 6, 11, 12, 6))
    assert proposer.propose(tokens, 3) == Guess((13, 6, 14), PREDICTION)
    proposer, tokens = followed(file, (10, 6, 11, 12, 5))
    assert proposer.propose(tokens, 3) == Guess((13, 5, 14), PREDICTION)


@given(st.integers(0, 10_000), st.integers(1, 9))
@settings(max_examples=examples(50), deadline=None)
def test_most_of_an_edited_file_is_proposed(seed, pace):
    """A file of few kinds of tokens, in which single tokens are replaced, added or left out."""
    rng = Random(seed)
    file = [rng.randrange(40) for _ in range(300)]
    edited = list(file)
    for _ in range(8):
        place = rng.randrange(len(edited))
        edited[place : place + rng.randrange(2)] = [rng.randrange(40)] * rng.randrange(2)
    proposer, tokens = followed(file, (), pace=pace)
    right = 0
    for token in edited:
        guess = proposer.propose(tokens, 1)
        right += guess.proposer == PREDICTION and guess.tokens == (token,)
        tokens.append(token)
        proposer.learn(tokens, pace)
    assert right > 0.9 * len(edited)
    for token in (1, 2, 3) * 5:  # it goes on after the end of the prediction
        tokens.append(token)
        proposer.learn(tokens, pace)
        assert len(proposer.propose(tokens, 3).tokens) <= 3
