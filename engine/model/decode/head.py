"""What comes after a model's layers: the final norm, the head, and what turns the head's outputs into logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.model.batch.rows import Longs
from engine.model.spec.config import ModelSpec
from lora_kernels.backend import Backend
from lora_kernels.linear import Linear
from lora_kernels.tokens import TrainedTokens


@dataclass(frozen=True, slots=True)
class Head:
    """Computes hidden states and logits of rows of the residual stream. `norm`, the final RMSNorm, is [hidden_size].
    Of several pipeline stages only the first has `norm` and `linear`."""

    spec: ModelSpec
    norm: Tensor
    linear: Linear

    def hidden(self, x: Tensor, backend: Backend) -> Tensor:
        """Return the hidden states [num_rows, hidden_size], as `linear` reads them, of rows of the residual stream."""
        return backend.pointwise.add_norm(x, None, self.norm, self.spec.rms_norm_eps)

    def outputs(self, hidden: Tensor, tokens: TrainedTokens | None, rows: Longs | None) -> Tensor:
        """Return the outputs of `linear` for `hidden`, hidden states of the step's rows `rows`. Outputs of trained
        `tokens` are computed with the rows that the row's adapter has."""
        outputs = self.linear(hidden)
        if tokens is not None:
            tokens.adjust(outputs, hidden, rows)
        return outputs

    def finish(self, outputs: Tensor) -> Tensor:
        """Turn outputs into logits, in place, and return them: divide them (Granite), and bound them as `Scores.cap`
        bounds scores (Gemma 2). Each operation is rounded, as by Hugging Face."""
        if self.spec.logits_divisor != 1.0:
            outputs.div_(self.spec.logits_divisor)
        if self.spec.logits_cap is not None:
            outputs.div_(self.spec.logits_cap).tanh_().mul_(self.spec.logits_cap)
        return outputs

    def logits(
        self, x: Tensor, backend: Backend, tokens: TrainedTokens | None = None, rows: Longs | None = None
    ) -> Tensor:
        """Return the logits [num_rows, vocab_size], in the model's dtype, of rows `x` of the residual stream. With
        trained `tokens`, `rows` are their numbers in the step; None means all."""
        return self.finish(self.outputs(self.hidden(x, backend), tokens, rows))
