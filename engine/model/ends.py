"""The embedding of families that scale its rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lora_kernels.linear import Embedding


@dataclass(frozen=True, slots=True)
class ScaledEmbedding:
    """An embedding whose rows are multiplied by `scale`."""

    part: Embedding
    scale: float

    def __call__(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns rows [num_rows, hidden_size]: `out`, if it is given."""
        return self.part(token_ids, out).mul_(self.scale)
