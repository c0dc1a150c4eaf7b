"""The amounts of work in a step, and the duration that is predicted from them."""

from __future__ import annotations

from typing import NamedTuple


class StepFeatures(NamedTuple):
    """The amounts of work in a step that determine its duration.

    Attributes:
        prefill_tokens: tokens in chunks of more than one token.
        decode_tokens: number of decodes: chunks of one token, and each token of chunks with proposals.
        decode_context: sum of the context lengths of the decodes, in tokens.
        prefill_attention: number of query-key pairs of prefill: sum of x * start + x**2 / 2 over chunks of x tokens.
        adapters: number of distinct adapters.
        lora_rows: sum of rank * tokens.
        pages_moved: pages copied between host and device, for adapters and for KV.
        scored_tokens: those of the prefill tokens whose chunks have prompt logprobs computed.
        launched: 1 if the host launches the step kernel by kernel while the device computes, 0 if it is replayed or the
            host only waits.
    """

    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    decode_context: float = 0.0
    prefill_attention: float = 0.0
    adapters: float = 0.0
    lora_rows: float = 0.0
    pages_moved: float = 0.0
    scored_tokens: float = 0.0
    launched: float = 0.0

    @property
    def tokens(self) -> float:
        return self.prefill_tokens + self.decode_tokens


NOTHING = StepFeatures()


class StepForecast(NamedTuple):
    """What the planner predicts of a step."""

    seconds: float = 0.0
    """Predicted duration of the step; 0 while the step-time model is cold or if nothing is computed."""
    features: StepFeatures = NOTHING
    """Amounts of work in the step, from which `seconds` was computed."""
    alone: float = 0.0
    """Predicted duration in seconds of the step without its batch work, if it has interactive decodes; otherwise 0."""
