"""Section A: the device's sampler chooses the tokens that the CPU's chooses from the same logits.

Exponentials round otherwise on a GPU: a draw may fall on the other side of a bound that lies within that rounding of
it. Greedy tokens and logprobs leave no such room.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.shapes import model_spec
from engine.core.types import SampledToken, SamplingParams
from engine.model.device_sampler import DeviceSampler
from engine.model.sampler import Sampler

TESTS = Path(__file__).parents[2] / "tests" / "model"
EQUAL_SHARE = 0.99
"""Of drawn tokens: a draw is that near to a bound once in ten thousand times, and some rows have many bounds."""
LEAST_S = 2.0


def run(journal: Journal) -> None:
    device, rounds = torch.device(journal.device), 1 if journal.tiny else 20
    with journal.case("sampler", LEAST_S):
        equal, total = check(model_spec(journal.tiny).vocab_size, rounds, device)
        journal.row("sampler", f"{rounds} steps of every kind of request", tokens=total, equal=equal)
        assert equal >= EQUAL_SHARE * total, f"{total - equal} of {total} tokens are not those of the CPU"


def check(vocab: int, rounds: int, device: torch.device) -> tuple[int, int]:
    """(tokens that are equal, all tokens), of requests of every kind. Raises AssertionError where one that may not
    differ does."""
    sys.path.insert(0, str(TESTS))
    from device_sampler_checks import MIXED

    equal = total = 0
    for seed in range(rounds):
        logits = torch.randn(len(MIXED), vocab, generator=torch.Generator().manual_seed(seed)) * 3
        ours = sample(DeviceSampler(vocab, device), logits.to(device), MIXED)
        theirs = sample(Sampler(vocab, torch.device("cpu")), logits, MIXED)
        for params, mine, other in zip(MIXED, ours, theirs, strict=True):
            assert params.temperature > 0 or mine.token == other.token, f"greedy tokens differ: {params}"
            if mine.token == other.token and mine.logprobs and other.logprobs:
                assert abs(mine.logprobs.logprob - other.logprobs.logprob) < 1e-3, f"logprobs differ: {params}"
            equal += mine.token == other.token
            total += 1
    return equal, total


def sample(
    sampler: Sampler | DeviceSampler, logits: torch.Tensor, kinds: Sequence[SamplingParams]
) -> list[SampledToken]:
    """One step of requests that have generated one token."""
    names = [f"r{row}" for row in range(len(kinds))]
    for name, params in zip(names, kinds, strict=True):
        sampler.add(name, params, [4, 5, 6, 4, 7], 4)
    return sampler.start(logits, names).to_host()
