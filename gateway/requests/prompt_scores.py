"""Log probabilities of a prompt's tokens, on their way from the engine's events to a response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from engine.core.messages.prompt_logprobs import PromptLogprob, row_bytes, unpack

ENTRIES_AT_ONCE = 1024
"""Maximum number of log probabilities that are rendered before other requests get a turn on the event loop: each takes
one or two microseconds."""


class PromptScores(NamedTuple):
    """Consecutive tokens of a prompt with their log probabilities. The prompt's first token, if it is among them, has
    none, because nothing comes before it."""

    token_ids: tuple[int, ...] = ()
    rows: bytes = b""
    """Log probabilities of the tokens, in the format of `engine.core.messages.prompt_logprobs`."""
    width: int = 0
    """Number of alternatives of each token."""

    @property
    def num_entries(self) -> int:
        """Number of log probabilities: those of the tokens and of their alternatives."""
        return len(self.token_ids) * (1 + self.width)

    def pairs(self) -> Iterator[tuple[int, PromptLogprob | None]]:
        """Yield each token's id and its log probabilities; None for the prompt's first token."""
        rows = unpack(self.rows, self.width)
        missing = len(self.token_ids) - len(self.rows) // row_bytes(self.width)
        return zip(self.token_ids, chain([None] * missing, rows), strict=True)

    def split(self) -> Iterator[PromptScores]:
        """Yield the scores in parts of about `ENTRIES_AT_ONCE` log probabilities, in order, so that each part is
        rendered quickly. Without tokens, there is one empty part."""
        size, row = max(1, ENTRIES_AT_ONCE // (1 + self.width)), row_bytes(self.width)
        missing = len(self.token_ids) - len(self.rows) // row
        for start in range(0, max(1, len(self.token_ids)), size):
            ids, first = self.token_ids[start : start + size], max(0, start - missing)
            yield PromptScores(ids, self.rows[first * row : (start + size - missing) * row], self.width)


def join_scores(parts: Sequence[PromptScores]) -> PromptScores:
    """Return the scores of the tokens of all parts, which are given in order and must not be empty."""
    ids = tuple(token_id for part in parts for token_id in part.token_ids)
    return PromptScores(ids, b"".join(part.rows for part in parts), max(part.width for part in parts))


class PromptReader:
    """Assigns the rows of log probabilities that the engine sends, piece by piece, to the tokens of one prompt."""

    def __init__(self, prompt_ids: Sequence[int], width: int) -> None:
        """`width` is the number of alternatives that the engine was asked for."""
        self._prompt_ids = prompt_ids
        self._width = width
        self._num_read = 0

    @property
    def is_complete(self) -> bool:
        return self._num_read == len(self._prompt_ids)

    def read(self, rows: bytes) -> PromptScores:
        """Return the next tokens of the prompt, to which the rows belong. The first call also returns the prompt's
        first token."""
        first = self._num_read
        self._num_read = max(1, first) + len(rows) // row_bytes(self._width)
        return PromptScores(tuple(self._prompt_ids[first : self._num_read]), rows, self._width)
