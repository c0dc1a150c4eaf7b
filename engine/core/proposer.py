"""Proposers guess the next tokens of a sequence, so that one step can verify several of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

LONGEST_MATCH = 4
"""Number of last tokens that a prompt lookup compares at most; the shortest match has 2. A longer match would be a
little more reliable, and the acceptance that is measured tells the same."""
MOST_CANDIDATES = 8
"""Maximum number of earlier places that one lookup compares, the latest first, so that its time is bounded."""


class Proposer(Protocol):
    """Guesses the tokens that follow a sequence. It belongs to one request, whose tokens are only ever appended to."""

    def learn(self, tokens: Sequence[int], most: int) -> None:
        """Take note of at most `most` of the request's `tokens` that are new since the last call."""

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Return at most `most` tokens that may follow `tokens`, or none if there is no guess. This changes nothing."""


class PromptLookup:
    """A `Proposer` that finds the last tokens of a sequence in its prompt and answer, and proposes what followed there
    (prompt lookup decoding, Saxena 2023). Extractions, edits of code and summaries repeat their prompts.

    It keeps the places after every pair of tokens in a chain, the latest first, as LZ77 coders do: about 150 bytes for
    each distinct pair.
    """

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        """Pair of tokens -> latest place after it that is followed by a known token."""
        self._earlier = array("I", (0, 0))
        """For each place, the previous one after the same pair; 0 if there is none."""

    def learn(self, tokens: Sequence[int], most: int) -> None:
        """Add the next places, at most `most`, to the chains."""
        latest, earlier = self._latest, self._earlier
        start = len(earlier)
        for place in range(start, min(len(tokens), start + most)):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            earlier.append(latest.get(pair, 0))
            latest[pair] = place

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Return the tokens after the longest match, or after the latest of the longest ones. Where these reach the
        sequence's end, they go on with the proposals themselves, as in a text that repeats itself."""
        place = self._find(tokens)
        if not place:
            return ()
        found = list(tokens[place : place + most])
        while len(found) < most:
            found.append(found[len(found) - (len(tokens) - place)])
        return tuple(found)

    def _find(self, tokens: Sequence[int]) -> int:
        """Return the place after the best match of the last tokens; 0 if there is none."""
        if len(tokens) < 2:
            return 0
        place = self._latest.get(tokens[-2] << 32 | tokens[-1], 0)
        best = longest = 0
        for _ in range(MOST_CANDIDATES):
            if not place or longest == LONGEST_MATCH:
                break
            length = 2
            while length < min(LONGEST_MATCH, place) and tokens[place - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
            place = self._earlier[place]
        return best
