"""Who chooses tokens: on the CPU at once (sampler.py), on a GPU without the host (device_sampler.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
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


class SlotSampler(TokenSampler, Protocol):
    """Leaves each request's last token where a step finds it that was built before the token was known.

    Attributes:
        last_tokens: int64 [max_seqs], by slot, on the device of the logits.
    """

    last_tokens: Tensor

    def slots(self, request_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """int32 [len(request_ids)]. Each request's, from `add` to `remove`."""


class HeldTokens:
    """A `SlotSampler` of a sampler that knows its tokens at once."""

    def __init__(self, sampler: TokenSampler, max_seqs: int) -> None:
        self.last_tokens = torch.zeros(max_seqs, dtype=torch.int64)
        self._sampler = sampler
        self._slots: dict[str, int] = {}
        self._free = list(range(max_seqs - 1, -1, -1))

    def add(self, request_id: str, params: SamplingParams, tokens: Sequence[int], num_prompt: int) -> None:
        """See `TokenSampler.add`."""
        self._sampler.add(request_id, params, tokens, num_prompt)
        self._slots[request_id] = self._free.pop()

    def remove(self, request_id: str) -> None:
        """See `TokenSampler.remove`."""
        self._sampler.remove(request_id)
        self._free.append(self._slots.pop(request_id))

    def slots(self, request_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """See `SlotSampler.slots`."""
        return np.array([self._slots[request_id] for request_id in request_ids], dtype=np.int32)

    def start(self, logits: Tensor, request_ids: Sequence[str], masks: TokenMasks | None = None) -> Sample:
        """See `TokenSampler.start`."""
        sample = self._sampler.start(logits, request_ids, masks)
        self.last_tokens[torch.from_numpy(self.slots(request_ids))] = sample.ids
        return sample


def make_sampler(vocab_size: int, device: torch.device, eos_token_ids: tuple[int, ...], max_seqs: int) -> SlotSampler:
    """The device's sampler.

    Args:
        eos_token_ids: banned, together with a request's own stop tokens, until it has `min_tokens`.
        max_seqs: requests at once.
    """
    if device.type == "cuda":
        # Imported here: a machine without CUDA may have no triton.
        from engine.model.device_sampler import DeviceSampler

        return DeviceSampler(vocab_size, device, eos_token_ids, max_seqs)
    return HeldTokens(Sampler(vocab_size, device, eos_token_ids), max_seqs)
