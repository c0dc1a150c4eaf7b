"""Who chooses tokens: on the CPU at once (sampler.py), on a GPU without the host (device_sampler.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.core.types import SampledToken, SamplingParams
from engine.model.masks import TokenMasks
from engine.model.sampler import Sampler


class Sample(Protocol):
    """Tokens of one step, which the host may not know yet."""

    @property
    def ids(self) -> Tensor:
        """int64 [num_rows], on the device of the logits; the next step may read them at once."""

    def to_host(self) -> list[SampledToken]:
        """The tokens and what was asked for besides, in the order of the requests. Waits until they are there."""


class TokenSampler(Protocol):
    """Samples for the requests it has been told of, and keeps their histories."""

    def add(self, request_id: str, params: SamplingParams, tokens: Sequence[int], num_prompt: int) -> None:
        """Begins, or after a preemption resumes, a request whose known tokens are `tokens`, the prompt first."""

    def remove(self, request_id: str) -> None:
        """Forgets a request; one that is not known is an error (KeyError)."""

    def start(self, logits: Tensor, request_ids: Sequence[str], masks: TokenMasks | None = None) -> Sample:
        """Chooses the next token of each request and adds it to its history.

        Args:
            logits: [len(request_ids), vocab_size], of any floating dtype; not changed.
            masks: what rows may become; None: anything. Logprobs know nothing of it.

        Raises:
            KeyError: a request is not known.
        """


def make_sampler(vocab_size: int, device: torch.device, eos_token_ids: tuple[int, ...], max_seqs: int) -> TokenSampler:
    """The device's sampler.

    Args:
        eos_token_ids: banned, together with a request's own stop tokens, until it has `min_tokens`.
        max_seqs: requests at once.
    """
    if device.type == "cuda":
        # Imported here: a machine without CUDA may have no triton.
        from engine.model.device_sampler import DeviceSampler

        return DeviceSampler(vocab_size, device, eos_token_ids, max_seqs)
    return Sampler(vocab_size, device, eos_token_ids)
