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
        """Wait until the host has the step's sampled tokens. Return them, with requested logprobs, in the order of the
        requests."""


class SlotSampler(Protocol):
    """Protocol of a sampler for the requests that were added to it, whose histories it keeps. `last_tokens`, int64
    [max_seqs] on the logits' device, has each slot's last token, for steps built before the host knows it."""

    last_tokens: Tensor

    def add(self, request_id: str, params: SamplingParams, tokens: Sequence[int], num_prompt: int) -> None:
        """Add a request to the sampler and assign it a slot, or resume it after a preemption. `tokens` are its known
        tokens, the `num_prompt` of its prompt first."""

    def remove(self, request_id: str) -> None:
        """Drop a request's history and free its sampler slot. Raises KeyError if the request is not known."""

    def start(
        self,
        logits: Tensor,
        request_ids: Sequence[str],
        masks: TokenMasks | None = None,
        proposals: Proposals = NO_PROPOSALS,
    ) -> Sample:
        """Choose the next token of each request and add it to its history. Raises KeyError for an unknown request.

        Args:
            logits: [len(request_ids), vocab_size]; not changed.
            masks: None means that all tokens are allowed. Logprobs ignore masks.
            proposals: see `Sampler.sample`. A GPU's plans have none.
        """

    def slots(self, request_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """Return each request's sampler slot, its index in `last_tokens`, int32 [len(request_ids)]. A request keeps its
        slot from `add` to `remove`."""


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
        """Add a request to the wrapped sampler and assign it a slot. `tokens` are all its known tokens, the prompt
        first. Raises ValueError if no slot is free."""
        if not self._free:
            raise ValueError(f"request {request_id} finds every one of {len(self._slots)} slots taken")
        self._sampler.add(request_id, params, tokens, num_prompt)
        self._slots[request_id] = self._free.pop()

    def remove(self, request_id: str) -> None:
        """Remove a request from the wrapped sampler and free its slot. Raises KeyError if the request is not known."""
        self._sampler.remove(request_id)
        self._free.append(self._slots.pop(request_id))

    def slots(self, request_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """Return each request's sampler slot, its index in `last_tokens`, int32 [len(request_ids)]. A request keeps its
        slot from `add` to `remove`."""
        return np.array([self._slots[request_id] for request_id in request_ids], dtype=np.int32)

    def start(
        self,
        logits: Tensor,
        request_ids: Sequence[str],
        masks: TokenMasks | None = None,
        proposals: Proposals = NO_PROPOSALS,
    ) -> HostSample:
        """Choose the next token of each request, or several after proposals (see `Sampler.sample`), with the wrapped
        sampler, and write the last one to its slot of `last_tokens`."""
        sampled = self._sampler.sample(logits, request_ids, masks, proposals)
        last = {one.request_id: one.token for one in sampled}
        self.last_tokens[torch.from_numpy(self.slots(tuple(last)))] = torch.tensor(tuple(last.values()))
        return HostSample(sampled)


def make_sampler(vocab_size: int, device: torch.device, eos_token_ids: tuple[int, ...], max_seqs: int) -> SlotSampler:
    """Return a sampler for up to `max_seqs` running requests: a `DeviceSampler` if `device` is a GPU, else `HeldTokens`
    over a `Sampler`. It bans `eos_token_ids`, like a request's own stop tokens, until the request has `min_tokens`
    tokens."""
    if device.type == "cuda":
        # Imported here: a machine without CUDA may have no triton.
        from engine.model.sample.device_sampler import DeviceSampler

        return DeviceSampler(vocab_size, device, eos_token_ids, max_seqs)
    return HeldTokens(Sampler(vocab_size, device, eos_token_ids), max_seqs)
