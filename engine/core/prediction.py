"""Proposals from a text that the caller expects the answer to repeat for the most part, such as a file to be edited:
the field `prediction` of OpenAI's API ("Predicted Outputs")."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.proposer import Guess, Proposer

PREDICTION = "prediction"
"""Name of this proposer in counts of proposals."""
AHEAD, BEHIND = 512, 128
"""Numbers of tokens after and before the last known place in a prediction within which the answer's newest pair of
tokens is looked for: some pages of code that an edit leaves out, or writes again. The search takes 10 us."""

MOST_UNSEEN = 16
"""Maximum number of tokens after the learned ones that are followed for one guess: those that a grammar forces."""


class Prediction:
    """A `Proposer` that follows the answer through a predicted text, and proposes what comes next there. Where the
    answer differs by one token, the prediction is taken to go on after its own; otherwise two tokens in a row must be
    found near the last known place. While there is none, `other` proposes."""

    def __init__(self, prompt_ids: Sequence[int], prediction: tuple[int, ...], other: Proposer) -> None:
        self._text = prediction
        self._other = other
        self._seen = len(prompt_ids)
        """Number of the request's tokens that were followed."""
        self._place = 0
        """Place in the text that is expected next."""
        self._misses = 0
        """Number of the answer's last tokens that differed from the text."""

    def learn(self, tokens: Sequence[int], most: int) -> None:
        seen = min(len(tokens), self._seen + most)
        self._place, self._misses = self._follow(tokens, range(self._seen, seen))
        self._seen = max(seen, self._seen)
        self._other.learn(tokens, most)

    def propose(self, tokens: Sequence[int], most: int) -> Guess:
        if len(tokens) - self._seen > MOST_UNSEEN:
            return self._other.propose(tokens, most)
        place, misses = self._follow(tokens, range(self._seen, len(tokens)))
        if misses > 1 or place >= len(self._text):
            return self._other.propose(tokens, most)
        return Guess(self._text[place : place + most], PREDICTION)

    def end(self, tokens: Sequence[int]) -> None:
        self._other.end(tokens)

    def _follow(self, tokens: Sequence[int], new: Iterable[int]) -> tuple[int, int]:
        """Return the place in the text after the `new` places of `tokens`, and the number of misses."""
        place, misses = self._place, self._misses
        for number in new:
            if misses < 2 and place < len(self._text) and self._text[place] == tokens[number]:
                place, misses = place + 1, 0
            elif found := self._find(tokens[number - 1], tokens[number], place):
                place, misses = found, 0
            else:
                place, misses = place + (not misses), misses + 1
        return place, misses

    def _find(self, before: int, token: int, near: int) -> int:
        """Return the place after the pair of tokens: the first one after `near`, otherwise the first one shortly before
        it; 0 if there is none."""
        return self._after(before, token, near, near + AHEAD) or self._after(before, token, near - BEHIND, near)

    def _after(self, before: int, token: int, start: int, end: int) -> int:
        """Return the place after the first such pair whose second token is at `start` to `end - 1`; 0 for none."""
        text, start = self._text, max(1, start)
        while token in text[start:end]:
            place = text.index(token, start, end)
            if text[place - 1] == before:
                return place + 1
            start = place + 1
        return 0
