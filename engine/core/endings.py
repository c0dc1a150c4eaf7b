"""Decides when an answer is complete."""

from __future__ import annotations

from engine.core.sequence import Sequence
from engine.core.types import FinishReason


def finish_reason(seq: Sequence, eos_token_ids: tuple[int, ...], max_model_len: int) -> FinishReason | None:
    """Return why the newest token ends the sequence. None means that the sequence goes on.

    With a grammar, an EOS token always ends the sequence, because no token may follow it.
    """
    params, token = seq.request.params, seq.tokens[-1]
    if params.grammar is not None and token in eos_token_ids:
        return FinishReason.STOP
    stops = token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos)
    if stops and seq.num_generated >= params.min_tokens:
        return FinishReason.STOP
    if seq.num_generated >= params.max_tokens or len(seq.tokens) >= max_model_len:
        return FinishReason.LENGTH
    return None
