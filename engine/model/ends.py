"""The embedding and the head of families that scale what these compute."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lora_kernels.linear import Embedding, Linear


@dataclass(frozen=True, slots=True)
class ScaledEmbedding:
    """An embedding whose rows are multiplied by `scale`."""

    part: Embedding
    scale: float

    def __call__(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns rows [num_rows, hidden_size]: `out`, if it is given."""
        return self.part(token_ids, out).mul_(self.scale)


@dataclass(frozen=True, slots=True)
class ScaledHead:
    """A head whose logits are divided by `divisor`."""

    part: Linear
    divisor: float

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the logits of all tokens, [num_rows, vocab_size]."""
        return self.part(x).div_(self.divisor)
