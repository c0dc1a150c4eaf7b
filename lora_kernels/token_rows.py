"""Describes the rows of the embedding and of the head that an adapter has in place of the base model's (tokens.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor, device

from lora_kernels.pinned import upload

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenIds:
    """The tokens whose rows of the embedding and of the head an adapter replaces."""

    embedding: Longs
    head: Longs
    """`embedding` and `head`: int64, each ascending."""
    num_rows: int
    """Number of rows that are stored. The embedding's are the first of them and the head's the last, so that rows that
    both have are stored once."""
    width: int
    """Elements of a row."""


class TokenRows(NamedTuple):
    """Rows of a matrix, on the device: `ids` of their tokens, int64, ascending, and `starts`, int64, the element offset
    of each in the arena."""

    ids: Tensor
    starts: Tensor


class TokenTable(NamedTuple):
    """Where the rows lie that one adapter has in place of the base model's, in the embedding and in the head."""

    embedding: TokenRows
    head: TokenRows


def make_token_table(tokens: TokenIds, starts: Longs, on: device) -> TokenTable:
    """Return the table of an adapter's rows on a device. `starts`, int64 [tokens.num_rows], are the elements of the
    arena at which the rows start."""
    first = tokens.num_rows - len(tokens.head)
    embedding = TokenRows(upload(tokens.embedding, on), upload(starts[: len(tokens.embedding)], on))
    return TokenTable(embedding, TokenRows(upload(tokens.head, on), upload(starts[first:], on)))
