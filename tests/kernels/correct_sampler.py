"""Section A: the device's sampler chooses the same tokens as the CPU's sampler from the same logits.

Exponentials round differently on a GPU, so a draw within rounding error of a bound may fall on its other side. Greedy
tokens and 99 % of all tokens must be equal, and logprobs of equal tokens must agree to 1e-3.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.exact import random_masks
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.shapes import model_spec
from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import SampledToken
from engine.model.sample.device_sampler import DeviceSampler
from engine.model.sample.masks import TokenMasks
from engine.model.sample.slot_sampler import SlotSampler, make_sampler

TESTS = Path(__file__).parents[1] / "model"
EQUAL_SHARE = 0.99
"""Minimum share of tokens that must be equal. A draw is within rounding error of a bound once in ten thousand times,
and some rows have many bounds."""
LEAST_S = 2.0


def run(journal: Journal) -> None:
    device, rounds = torch.device(journal.device), 1 if journal.tiny else 20
    with journal.case("sampler", LEAST_S):
        equal, total = check(model_spec(journal.tiny).vocab_size, rounds, device)
        journal.row("sampler", f"{rounds} steps of every kind of request", tokens=total, equal=equal)
        assert equal >= EQUAL_SHARE * total, f"{total - equal} of {total} tokens are not those of the CPU"


def check(vocab: int, rounds: int, device: torch.device) -> tuple[int, int]:
    """Sample `rounds` steps of requests of every kind, a third of them under masks, on `device` and on the CPU from the
    same random logits. Returns the numbers of equal and of all tokens. Raises AssertionError if a greedy token or an
    equal token's logprob differs."""
    sys.path.insert(0, str(TESTS))
    from device_sampler_checks import MIXED

    equal = total = 0
    for seed in range(rounds):
        logits = torch.randn(len(MIXED), vocab, generator=torch.Generator().manual_seed(seed)) * 3
        masks = random_masks(range(seed % 3, len(MIXED), 3), vocab, seed)
        ours = sample(DeviceSampler(vocab, device), logits.to(device), MIXED, masks)
        theirs = sample(make_sampler(vocab, torch.device("cpu"), (), len(MIXED)), logits, MIXED, masks)
        for params, mine, other in zip(MIXED, ours, theirs, strict=True):
            assert params.temperature > 0 or mine.token == other.token, f"greedy tokens differ: {params}"
            if mine.token == other.token and mine.logprobs and other.logprobs:
                assert abs(mine.logprobs.logprob - other.logprobs.logprob) < 1e-3, f"logprobs differ: {params}"
            equal += mine.token == other.token
            total += 1
    return equal, total


def sample(
    sampler: SlotSampler, logits: torch.Tensor, kinds: Sequence[SamplingParams], masks: TokenMasks
) -> list[SampledToken]:
    """Sample one token for each of `kinds` under `masks`, for requests with a prompt of four tokens and one generated
    token."""
    names = [f"r{row}" for row in range(len(kinds))]
    for name, params in zip(names, kinds, strict=True):
        sampler.add(name, params, [4, 5, 6, 4, 7], 4)
    return sampler.start(logits, names, masks).to_host()
