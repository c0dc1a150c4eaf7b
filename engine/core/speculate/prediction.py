"""Proposals from a text that the caller expects the answer to repeat for the most part, such as a file to be edited:
the field `prediction` of OpenAI's API ("Predicted Outputs")."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from engine.core.speculate.follower import Follower
from engine.core.speculate.proposer import Guess, Proposer

PREDICTION = "prediction"
"""Name of `Prediction` as a proposer, in counts of proposals."""
NEAR, FAR = 32, 512
"""Distances, in tokens before and after the last known place in a prediction, up to which the answer is searched for:
`NEAR` for its last two tokens and, if these are not found, `FAR` for its last three. They cover lines, or some pages,
that an edit leaves out or writes again. The search takes some 10 us."""


class Prediction:
    """A `Proposer` of tokens for speculation. It follows the answer through the text that the caller predicted (see
    speculate/follower.py), and proposes what comes next there. Where the answer leaves the text, the answer's last
    tokens must be found near the last known place. While they are not, the proposer `other` proposes."""

    def __init__(self, prompt_ids: Sequence[int], prediction: tuple[int, ...], other: Proposer) -> None:
        self._text = prediction
        self._other = other
        self._seen = len(prompt_ids)
        """Number of the request's leading tokens that `learn` has processed, including those of the prompt, which need
        not be followed."""
        self._follower = Follower(3)

    def learn(self, tokens: Sequence[int], most: int) -> None:
        seen = min(len(tokens), self._seen + most)
        for number in range(self._seen, seen):
            self._follower.follow(self._text, tokens, number, self._find)
        self._seen = max(seen, self._seen)
        self._other.learn(tokens, most)

    def propose(self, tokens: Sequence[int], most: int) -> Guess:
        guess = self._follower.expected(self._text, tokens[self._seen :], most)
        return Guess(guess, PREDICTION) if guess else self._other.propose(tokens, most)

    def end(self, tokens: Sequence[int]) -> None:
        self._other.end(tokens)

    def _find(self, last: Sequence[int]) -> int:
        """Return the position in the predicted text after the answer's last two tokens, if they occur within `NEAR` of
        the last known position, or else after all of `last` (its last three), within `FAR`. The first occurrence behind
        the known position is preferred to the first one before it. 0 means that there is none."""
        place = self._follower.place
        for tokens, most in ((tuple(last[-2:]), NEAR), (tuple(last), FAR)):
            found = self._after(tokens, place, place + most) or self._after(tokens, place - most, place)
            if found:
                return found
        return 0

    def _after(self, tokens: tuple[int, ...], start: int, end: int) -> int:
        """Return the position in the predicted text after the first occurrence of `tokens` whose last token is at a
        position from `start` to `end - 1`; 0 means that there is none."""
        text, count = self._text, len(tokens)
        start = max(count - 1, start)
        with suppress(ValueError):  # from `index`, where the last token is not found
            while True:
                start = text.index(tokens[-1], start, end) + 1
                if text[start - count : start] == tokens:
                    return start
        return 0
