"""The embedding and the head of a model of which each rank has some tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.parallel.ranks import Ranks
from engine.model.parallel.shard import Cut
from lora_kernels.linear import Embedding, Linear


@dataclass(frozen=True, slots=True)
class SharedEmbedding:
    """The embedding of all tokens, of which this rank has those of `tokens` in `part`."""

    part: Embedding
    tokens: Cut
    ranks: Ranks

    def __call__(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns rows [num_rows, hidden_size]: `out`, if it is given. Each is the sum of one rank's row and of zeros,
        which is exact."""
        ids = token_ids - self.tokens.start
        others = (ids < 0) | (ids >= self.tokens.stop - self.tokens.start)
        rows = self.part(ids.masked_fill(others, 0)).masked_fill_(others[:, None], 0)
        total = self.ranks.sum(rows, rows.dtype)
        return total if out is None else out.copy_(total)


@dataclass(frozen=True, slots=True)
class SharedHead:
    """The head of all tokens, of which this rank has a part."""

    part: Linear
    vocab_size: int
    ranks: Ranks

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Returns the logits of all tokens, [num_rows, vocab_size], on every rank."""
        return self.ranks.join_columns(self.part(x), self.vocab_size)
