"""The sampling state of one request as GPU kernels read it: sixteen 64-bit words at a fixed address."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

GREEDY, DRAWN, FILTERED = 0, 1, 2
"""Kinds of requests: argmax, a draw from all tokens, and a draw from the tokens that top-k, top-p and min-p keep."""
SHARE_BITS = 62
"""Shares (`top_p`, `min_p`) are stored as integers in units of 2^-62."""
FLOATS = ("temperature", "repetition", "frequency", "presence")
SHARES = ("top_p", "min_p")


class SlotWords(NamedTuple):
    """The words of one request. A field's position in the tuple is its index in a row of int64 words."""

    kind: int
    """GREEDY (argmax), DRAWN (from all tokens) or FILTERED (from the tokens that top-k, top-p and min-p keep)."""
    seed: int
    """Any 64 bits."""
    position: int
    """Index of the next token in its sequence. Kernels increment it, and `num_generated`, after each token."""
    num_generated: int
    min_tokens: int
    """Stop tokens are banned while `num_generated` is below this number."""
    temperature: float
    top_k: int
    """0 is off, as is a value that keeps the whole vocabulary."""
    top_p: float
    min_p: float
    """`top_p` and `min_p`: in [0, 1]; `top_p` 1 and `min_p` 0 are off."""
    repetition: float
    frequency: float
    presence: float
    num_stops: int
    num_edits: int
    """`num_stops` and `num_edits`: number of stop tokens, which come first in `edits`, and number of all entries of
    `edits`."""
    edits: int
    """Address of int64 entries (token << 32 | bits of an fp32 that is added to the token's score); 0 if there are
    none."""
    seen: int
    """Address of int32 [vocab_size], which holds for each token twice the number of times it was generated, plus one if
    the sequence had the token on arrival; 0 where there are no penalties."""

    def pack(self) -> npt.NDArray[np.int64]:
        """Return the words as int64 [16], with `top_p` and `min_p` in units of 2^-62 and other floats as fp32 bits."""
        return np.array([_word(name, value) for name, value in self._asdict().items()], dtype=np.uint64).view(np.int64)


def _word(name: str, value: float) -> int:
    if name in FLOATS:
        return int(np.float32(value).view(np.uint32))
    if name in SHARES:
        return int(value * 2.0**SHARE_BITS)
    return int(value) & (2**64 - 1)


def pack_edits(tokens: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the entries that `SlotWords.edits` points to, for tokens and the numbers to add to their scores."""
    return (tokens << 32) | values.view(np.uint32).astype(np.int64)
