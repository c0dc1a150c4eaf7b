"""Masks of the tokens that may be sampled from rows of logits, with one bit for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_kernels.pinned import upload

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The allowed tokens of some rows of logits."""

    rows: tuple[int, ...]
    """Rows of the logits that are masked, ascending. In the other rows every token is allowed."""
    words: npt.NDArray[np.int32]
    """int32 [len(rows), ceil(vocab / 32)]. Bit t % 32 of word t // 32 says whether token t is allowed."""

    def apply(self, scores: Tensor, places: Sequence[int]) -> None:
        """Set the scores of forbidden tokens to minus infinity, in place, so that no other edit can allow them again.
        `scores` is [num_rows, vocab], of any floating dtype; `places` gives the row of `scores` for each of `rows`."""
        device = scores.device
        words = upload(self.words, device)
        bits = words[:, :, None] >> torch.arange(WORD_BITS, dtype=torch.int32, device=device)
        forbidden = (bits & 1 == 0).flatten(1)[:, : scores.shape[1]]
        rows = upload(np.array(places, dtype=np.int64), device)
        scores[rows] = scores[rows].masked_fill(forbidden, -torch.inf)


def num_words(vocab_size: int) -> int:
    """Return the number of int32 words of a mask over `vocab_size` tokens, one bit for each."""
    return -(-vocab_size // WORD_BITS)


def pack_bits(token_ids: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.int32]:
    """Return a bit mask, int32 [ceil(vocab_size / 32)]: bit t % 32 of word t // 32 is set for each token t of
    `token_ids`."""
    bits = np.zeros(num_words(vocab_size) * WORD_BITS, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
