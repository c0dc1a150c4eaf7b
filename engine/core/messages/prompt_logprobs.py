"""Format of the logprobs of prompt tokens, which travel from the executor to the gateway as bytes: a prompt may have a
hundred thousand tokens with 20 alternatives each, and Python objects for these would take many times the memory.

One row for each token, little-endian: its logprob (fp32), its rank (int32: 1 plus the number of likelier tokens), the
ids of the `width` likeliest tokens from the likeliest down (int32), and their logprobs (fp32). All are natural
logarithms under the model's distribution, before temperature and penalties.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from engine.core.messages.requests import TokenLogprobs

MOST_ALTERNATIVES = 20
"""Maximum `width` of a row: the most alternatives that OpenAI's API allows for a token."""


class PromptLogprob(NamedTuple):
    """Log probabilities of one prompt token. `rank` is 1 plus the number of likelier tokens at its position."""

    rank: int
    values: TokenLogprobs


def row_bytes(width: int) -> int:
    """Return the size in bytes of one packed row: the logprobs of one prompt token with `width` alternatives."""
    return 8 + 8 * width


def unpack(rows: bytes, width: int) -> Iterator[PromptLogprob]:
    """Yield the log probabilities of prompt tokens, one for each of the packed `rows`, which have `width` alternatives
    each. Raises struct.error if `rows` is not a whole number of rows."""
    for logprob, rank, *rest in struct.iter_unpack(f"<fi{width}i{width}f", rows):
        yield PromptLogprob(rank, TokenLogprobs(logprob, tuple(zip(rest[:width], rest[width:], strict=True))))
