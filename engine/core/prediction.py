"""Proposals from a text that the caller expects the answer to repeat for the most part, such as a file to be edited:
the field `prediction` of OpenAI's API ("Predicted Outputs")."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.proposer import Guess, Proposer

PREDICTION = "prediction"
"""Name of this proposer in counts of proposals."""
NEAR, FAR = 32, 512
"""Numbers of tokens before and after the last known place in a prediction within which the answer's last two or, if
these are not found, its last three tokens are looked for: lines, or some pages, that an edit leaves out or writes
again. The search takes some 10 us."""


class Prediction:
    """A `Proposer` that follows the answer through a predicted text, and proposes what comes next there. Where the
    answer differs by one token, the prediction is taken to go on after its own, and if it does, the token is replaced
    in what is proposed from then on, as where a name is changed. Otherwise the last tokens must be found near the last
    known place. While they are not, `other` proposes."""

    def __init__(self, prompt_ids: Sequence[int], prediction: tuple[int, ...], other: Proposer) -> None:
        self._text = prediction
        self._other = other
        self._seen = len(prompt_ids)
        """Number of the request's tokens that were followed."""
        self._place = 0
        """Place in the text that is expected next."""
        self._misses = 0
        """Number of the answer's last tokens that differed from the text."""
        self._replaced: dict[int, int] = {}
        """Token of the text -> the answer's token in its place, when the text last had that token."""

    def learn(self, tokens: Sequence[int], most: int) -> None:
        seen = min(len(tokens), self._seen + most)
        for number in range(self._seen, seen):
            self._follow(tuple(tokens[max(0, number - 2) : number + 1]))
        self._seen = max(seen, self._seen)
        self._other.learn(tokens, most)

    def propose(self, tokens: Sequence[int], most: int) -> Guess:
        unseen = tuple(tokens[self._seen :])
        expected = self._text[self._place : self._place + len(unseen) + most] if self._misses < 2 else ()
        guess = tuple(self._replaced.get(token, token) for token in expected)
        if len(guess) <= len(unseen) or guess[: len(unseen)] != unseen:
            return self._other.propose(tokens, most)
        return Guess(guess[len(unseen) :], PREDICTION)

    def end(self, tokens: Sequence[int]) -> None:
        self._other.end(tokens)

    def _follow(self, last: tuple[int, ...]) -> None:
        """Take note of the answer's next token, the last one of the request's `last` three or fewer tokens."""
        token = last[-1]
        expected = self._text[self._place] if self._place < len(self._text) and self._misses < 2 else None
        if expected is not None and token in (expected, self._replaced.get(expected)):
            if self._misses:
                self._replaced[self._text[self._place - 1]] = last[-2]
            if token == expected:
                self._replaced.pop(expected, None)
            self._place, self._misses = self._place + 1, 0
        elif self._misses == 1 and token == self._text[self._place - 1]:  # the token before was inserted
            self._misses = 0
        elif found := self._find(last):
            self._place, self._misses = found, 0
        else:
            self._place += expected is not None and not self._misses
            self._misses += 1

    def _find(self, last: tuple[int, ...]) -> int:
        """Return the place in the text after the last two tokens, or after all of `last` if that is farther away: the
        first one after the last known place, otherwise the first one in the range before it; 0 if there is none."""
        place = self._place
        for tokens, most in ((last[-2:], NEAR), (last, FAR)):
            found = self._after(tokens, place, place + most) or self._after(tokens, place - most, place)
            if found:
                return found
        return 0

    def _after(self, tokens: tuple[int, ...], start: int, end: int) -> int:
        """Return the place after the first occurrence of `tokens` whose last one is at `start` to `end - 1`; 0 if there
        is none."""
        text, count = self._text, len(tokens)
        start = max(count - 1, start)
        while tokens[-1] in text[start:end]:
            start = text.index(tokens[-1], start, end) + 1
            if text[start - count : start] == tokens:
                return start
        return 0
