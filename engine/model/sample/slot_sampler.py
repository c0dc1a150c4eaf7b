"""Samplers: they choose tokens on the CPU at once (sample/sampler.py), on a GPU without the host
(sample/device_sampler.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import SampledToken
from engine.model.sample.masks import TokenMasks
from engine.model.sample.sampler import NO_PROPOSALS, Proposals, Sampler


class Sample(Protocol):
    """Protocol of the sampled tokens of one step, which the host may not know yet."""

    def to_host(self) -> list[SampledToken]:
        """Waits until the host has the step's sampled tokens. Returns them, with requested logprobs, in the order of
        the requests."""


class SlotSampler(Protocol):
    """Protocol of a sampler for the requests that were added to it, whose histories it keeps. It keeps each request's
    last token on the device, too, for steps that are built before the host knows the token. `last_tokens` is int64
    [max_seqs], the last token of each slot, on the device of the logits."""

    last_tokens: Tensor

    def add(self, request_id: str, params: SamplingParams, tokens: Sequence[int], num_prompt: int) -> None:
        """Adds a request to the sampler and assigns it a slot, or resumes it after a preemption. `tokens` are its known
        tokens, the `num_prompt` of its prompt first."""

    def remove(self, request_id: str) -> None:
        """Drops a request's history and frees its sampler slot. Raises KeyError if the request is not known."""

    def start(
        self,
        logits: Tensor,
        request_ids: Sequence[str],
        masks: TokenMasks | None = None,
        proposals: Proposals = NO_PROPOSALS,
    ) -> Sample:
        """Chooses the next token of each request and adds it to the request's history. Raises KeyError for an unknown
        request.

        Args:
            logits: [len(request_ids), vocab_size], of any floating dtype; not changed.
            masks: the tokens allowed in rows. None means that all are allowed. Logprobs ignore the masks.
            proposals: request id -> the tokens that its rows after the first were computed for (see `Sampler.sample`).
                A GPU's plans have none.
        """

    def slots(self, request_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """Returns each request's sampler slot, its index in `last_tokens`, int32 [len(request_ids)]. A request keeps
        its slot from `add` to `remove`."""


@dataclass(frozen=True, slots=True)
class HostSample:
    """The tokens of a step, which the host knows already, in the order of the requests, without those after refused
    proposals. See `Sample`."""

    sampled: list[SampledToken]

    def to_host(self) -> list[SampledToken]:
        return self.sampled


class HeldTokens:
    """A `SlotSampler` for a CPU. Wraps a sampler whose tokens the host knows at once, and assigns the slots."""

    def __init__(self, sampler: Sampler, max_seqs: int) -> None:
        self.last_tokens = torch.zeros(max_seqs, dtype=torch.int64)
        self._sampler = sampler
        self._slots: dict[str, int] = {}
        self._free = list(range(max_seqs - 1, -1, -1))

    def add(self, request_id: str, params: SamplingParams, tokens: Sequence[int], num_prompt: int) -> None:
        """Adds a request to the wrapped sampler and assigns it a slot. `tokens` are all its known tokens, the prompt
        first. Raises ValueError if no slot is free."""
        if not self._free:
            raise ValueError(f"request {request_id} finds every one of {len(self._slots)} slots taken")
        self._sampler.add(request_id, params, tokens, num_prompt)
        self._slots[request_id] = self._free.pop()

    def remove(self, request_id: str) -> None:
        """Removes a request from the wrapped sampler and frees its slot. Raises KeyError if the request is not
        known."""
        self._sampler.remove(request_id)
        self._free.append(self._slots.pop(request_id))

    def slots(self, request_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """Returns each request's sampler slot, its index in `last_tokens`, int32 [len(request_ids)]. A request keeps
        its slot from `add` to `remove`."""
        return np.array([self._slots[request_id] for request_id in request_ids], dtype=np.int32)

    def start(
        self,
        logits: Tensor,
        request_ids: Sequence[str],
        masks: TokenMasks | None = None,
        proposals: Proposals = NO_PROPOSALS,
    ) -> HostSample:
        """Chooses the next token of each request with the wrapped sampler, from `logits` ([len(request_ids),
        vocab_size]) where `masks` allow it, and writes the token to the request's slot of `last_tokens`. Requests with
        proposals may get several (see `Sampler.sample`), the last of which is written."""
        sampled = self._sampler.sample(logits, request_ids, masks, proposals)
        last = {one.request_id: one.token for one in sampled}
        self.last_tokens[torch.from_numpy(self.slots(tuple(last)))] = torch.tensor(tuple(last.values()))
        return HostSample(sampled)


def make_sampler(vocab_size: int, device: torch.device, eos_token_ids: tuple[int, ...], max_seqs: int) -> SlotSampler:
    """Returns a sampler for up to `max_seqs` running requests: a `DeviceSampler` if `device` is a GPU, else
    `HeldTokens` over a `Sampler`. It bans `eos_token_ids`, like a request's own stop tokens, until the request has
    `min_tokens` tokens."""
    if device.type == "cuda":
        # Imported here: a machine without CUDA may have no triton.
        from engine.model.sample.device_sampler import DeviceSampler

        return DeviceSampler(vocab_size, device, eos_token_ids, max_seqs)
    return HeldTokens(Sampler(vocab_size, device, eos_token_ids), max_seqs)
