"""Follows an answer through a text that it repeats for the most part, to propose its next tokens for speculative
decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_MISSES = 2
"""Number of tokens in a row that differ from the text, after which the answer has left it."""

Find = Callable[[Sequence[int]], int]
"""Function that looks for the given last tokens of an answer in the text, and returns the place after them; 0 if they
are not found."""


class Follower:
    """Follows an answer through a text that it mostly repeats, token by token, and expects it to go on as the text
    does, to propose tokens for speculative decoding. If one token of the answer differs and the next one agrees with
    the text again, the differing token is a replacement: it is expected from then on wherever the text has the token
    that it replaced, as when an edit changes a name."""

    def __init__(self, longest: int, *, is_lost: bool = False) -> None:
        """`longest` is how many of the answer's last tokens are looked up in the text when the answer does not go on as
        expected. `is_lost` means that the answer does not begin as the text does, so that its place must be looked up
        first."""
        self._longest = longest
        self.place = 0
        """Place in the text that is expected next, unless the answer has left the text."""
        self._misses = MOST_MISSES if is_lost else 0
        """Number of the answer's last tokens that differed from the text."""
        self.run = 0
        """Number of the answer's last tokens, in a row, that were as expected or by which the place in the text was
        found."""
        self._replaced: dict[int, int] = {}
        """Token of the text -> the answer's token in its place, when the text last had that token."""

    def expected(self, text: Sequence[int], unseen: Sequence[int], most: int) -> tuple[int, ...]:
        """Return at most `most` tokens that are expected to follow the answer, which consists of the tokens that
        `follow` has seen and the `unseen` ones. Empty if the answer has left the text, or if the unseen tokens are not
        as expected."""
        if self._misses >= MOST_MISSES:
            return ()
        coming = text[self.place : self.place + len(unseen) + most]
        tokens = tuple([self._replaced.get(token, token) for token in coming])
        return tokens[len(unseen) :] if tokens[: len(unseen)] == tuple(unseen) else ()

    def follow(self, text: Sequence[int], answer: Sequence[int], number: int, find: Find) -> None:
        """Advance the place in the text by the answer's token at index `number`. If it is not the expected one, `find`
        is called with the answer's last tokens and returns the new place in the text."""
        token, is_inside = answer[number], self.place < len(text) and self._misses < MOST_MISSES
        if is_inside and token in (expected := text[self.place], self._replaced.get(expected)):
            self._go_on(text, answer, number)
        elif self._misses == 1 and token == text[self.place - 1]:  # the token before was inserted
            self._misses, self.run = 0, 1
        elif found := find(answer[max(0, number + 1 - self._longest) : number + 1]):
            self.place, self._misses, self.run = found, 0, self._longest
        else:
            self.place += is_inside and not self._misses
            self._misses, self.run = self._misses + 1, 0

    def _go_on(self, text: Sequence[int], answer: Sequence[int], number: int) -> None:
        expected = text[self.place]
        if self._misses:
            self._replaced[text[self.place - 1]] = answer[number - 1]
        if answer[number] == expected:
            self._replaced.pop(expected, None)
        self.place, self._misses, self.run = self.place + 1, 0, self.run + 1
