"""Finds outputs of the model that are NaN or infinite, and end their request: those of diverged weights or adapters,
and activations beyond the range of fp16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.messages.requests import ErrorCode, Refusal
from engine.core.messages.step import SampledToken

UNSOUND = Refusal(
    ErrorCode.MODEL_OUTPUT_INVALID,
    "the model's output for this request is NaN or infinite: its weights or its adapter are broken, or its numbers "
    "exceed the range of the engine's dtype",
)


class AnswerEnd(NamedTuple):
    """Why a request cannot go on, and how many of its tokens of the step are still good."""

    refusal: Refusal
    num_good: int = 0


def sound_rows(logits: Tensor) -> list[bool]:
    """Return, for each row of logits ([num_rows, vocab_size]), whether it has a distribution: no logit is NaN or +inf,
    and not all are -inf."""
    # A sum is an eighth of the highest logit's cost. It is not finite for a forbidden token, and may overflow, either.
    sound = logits.sum(-1, dtype=torch.float32).isfinite()
    return (sound if bool(sound.all()) else logits.amax(-1).isfinite()).tolist()


def unsound_ends(sampled: Sequence[SampledToken]) -> dict[str, AnswerEnd]:
    """Return the ends of the requests that have a token of an unsound row, after their tokens before it."""
    ends: dict[str, AnswerEnd] = {}
    good: Counter[str] = Counter()
    for one in sampled:
        if not one.is_sound:
            ends.setdefault(one.request_id, AnswerEnd(UNSOUND, good[one.request_id]))
        good[one.request_id] += 1
    return ends
