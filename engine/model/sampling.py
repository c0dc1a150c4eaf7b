"""Samplers: they choose tokens on the CPU at once (sampler.py), on a GPU without the host (device_sampler.py)."""

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
    """The tokens of one step, which the host may not know yet."""

    @property
    def ids(self) -> Tensor:
        """Token ids, int64 [num_rows], on the device of the logits. The next step may read them at once."""

    def to_host(self) -> list[SampledToken]:
        """Returns the tokens and requested logprobs, in the order of the requests. Waits until the host has them."""


class TokenSampler(Protocol):
    """Samples for the requests that were added, and keeps their histories."""

    def add(self, request_id: str, params: SamplingParams, tokens: Sequence[int], num_prompt: int) -> None:
        """Adds a request, or resumes it after a preemption. `tokens` are all its known tokens, the prompt first."""

    def remove(self, request_id: str) -> None:
        """Forgets a request. Raises KeyError if it is not known."""

    def start(self, logits: Tensor, request_ids: Sequence[str], masks: TokenMasks | None = None) -> Sample:
        """Chooses the next token of each request and adds it to its history.

        Args:
            logits: [len(request_ids), vocab_size], of any floating dtype; not changed.
            masks: the tokens allowed in rows. None means that all are allowed. Logprobs ignore the masks.

        Raises:
            KeyError: a request is not known.
        """


class SlotSampler(TokenSampler, Protocol):
    """Keeps each request's last token on the device, for steps that are built before the host knows the token.

    Attributes:
        last_tokens: int64 [max_seqs]. The last token of each slot, on the device of the logits.
    """

    last_tokens: Tensor

    def slots(self, request_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """Returns each request's slot, int32 [len(request_ids)]. A request keeps its slot from `add` to `remove`."""


class HeldTokens:
    """Makes a `SlotSampler` of a sampler that knows its tokens at once."""

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
    """Returns a sampler for the device.

    Args:
        eos_token_ids: tokens banned, like a request's own stop tokens, until the request has `min_tokens` tokens.
        max_seqs: maximum number of running requests.
    """
    if device.type == "cuda":
        # Imported here: a machine without CUDA may have no triton.
        from engine.model.device_sampler import DeviceSampler

        return DeviceSampler(vocab_size, device, eos_token_ids, max_seqs)
    return HeldTokens(Sampler(vocab_size, device, eos_token_ids), max_seqs)
