"""When an answer is over."""

from __future__ import annotations

from engine.core.sequence import Sequence
from engine.core.types import FinishReason


def finish_reason(seq: Sequence, eos_token_ids: tuple[int, ...], max_model_len: int) -> FinishReason | None:
    """Whether the newest token ends the sequence. An EOS that a grammar allows does: nothing may follow it."""
    params, token = seq.request.params, seq.tokens[-1]
    if params.grammar is not None and token in eos_token_ids:
        return FinishReason.STOP
    stops = token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos)
    if stops and seq.num_generated >= params.min_tokens:
        return FinishReason.STOP
    if seq.num_generated >= params.max_tokens or len(seq.tokens) >= max_model_len:
        return FinishReason.LENGTH
    return None
