"""Draws tokens: reproducible uniform numbers, and filters that keep a prefix of the order (score, descending; id,
ascending), so that ties never make an outcome depend on a device or the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.core.messages.requests import SamplingParams

BLOCK = 64
"""Number of neighbouring tokens that are represented by their highest score in the search for the likeliest."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Sampling filters of n rows of logits, each [n, 1]: `top_k` int64 (0 is off), `top_p` float64 (1 is off), `min_p`
    float64 (0 is off)."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Filters:
        top_k = torch.tensor([[one.top_k] for one in params], dtype=torch.int64)
        top_p, min_p = torch.tensor([[one.top_p, one.min_p] for one in params], dtype=torch.float64).T[:, :, None]
        return cls(top_k, top_p.contiguous(), min_p.contiguous())


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return the uniform number in [0, 1) that decides the draw of each (seed, position), elementwise: SplitMix64's
    output function, applied to both."""
    step = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(_mix(seeds + step) + (positions + np.uint64(1)) * step)
    # 52 bits keep the product with a sum of probabilities below that sum.
    return (state >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def draw(scores: Tensor, uniform: Tensor, filters: Filters) -> Tensor:
    """Draw one token of each row (int64 [n]) from those of softmax(scores) that the filters keep, see
    `numba_sampling.draw`. `scores` is fp32 [n, vocab], `uniform` float64 [n, 1] in [0, 1)."""
    scores = scores.contiguous()
    try:
        from lora_kernels.cpu import numba_sampling
    except ImportError:  # a machine with a GPU, whose own sampler this one is compared with, may lack numba
        return draw_sorted(scores, uniform, filters)
    return numba_sampling.draw(scores, scores.softmax(-1), uniform, filters.top_k, filters.top_p, filters.min_p)


def draw_sorted(scores: Tensor, uniform: Tensor, filters: Filters) -> Tensor:
    """Draw what `draw` draws, by sorting each row."""
    vocab = scores.shape[1]
    filtered = (filters.top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0)
    ids = torch.where(filtered, ranked(scores, vocab), torch.arange(vocab))
    probs = scores.softmax(-1).gather(1, ids).double()
    cumulative = probs.cumsum(-1)
    kept = torch.where(filtered, _num_kept(probs, cumulative, filters), vocab)
    place = torch.searchsorted(cumulative, uniform * cumulative.gather(1, kept - 1), right=True)
    return ids.gather(1, torch.minimum(place, kept - 1))[:, 0]


def _num_kept(probs: Tensor, cumulative: Tensor, filters: Filters) -> Tensor:
    """Return how many of the likeliest tokens the filters keep, int64 [n, 1], at least 1. `probs` and `cumulative`,
    float64 [n, vocab], are the tokens' probabilities in order, and their cumulative sums."""
    vocab = probs.shape[1]
    top_k = torch.where(filters.top_k > 0, filters.top_k, vocab)
    likely = (probs >= filters.min_p * probs[:, :1]).sum(-1, keepdim=True)
    left = torch.minimum(likely, top_k).clamp(1, vocab)
    share = filters.top_p * cumulative.gather(1, left - 1)
    nucleus = (pad(cumulative[:, :-1], (1, 0)) < share).sum(-1, keepdim=True)
    return torch.minimum(left, nucleus).clamp(min=1)


def ranked(scores: Tensor, width: int) -> Tensor:
    """Return the ids (int64 [n, width]) of the first `width` tokens of each row of `scores` (fp32 [n, vocab]), ordered
    by (score, descending; id, ascending)."""
    # They lie in the first `width` blocks by (highest score, index): every block before a token's own holds a token
    # before it.
    rows, vocab = scores.shape
    if 2 * max(width, 1) * BLOCK >= vocab:
        return _ordered(scores, torch.arange(vocab, device=scores.device).expand(rows, -1), width)
    if vocab % BLOCK:
        scores = pad(scores, (0, -vocab % BLOCK), value=-torch.inf)
    blocks = scores.view(rows, -1, BLOCK)
    best = ranked(blocks.amax(-1), width)[:, :, None]
    ids = best * BLOCK + torch.arange(BLOCK, device=scores.device)
    return _ordered(blocks.gather(1, best.expand(-1, -1, BLOCK)).flatten(1), ids.flatten(1), width)


def _ordered(scores: Tensor, ids: Tensor, width: int) -> Tensor:
    """Return the first `width` of `ids` (int64 [n, m]) by (score, descending; id, ascending), where `scores` is fp32
    [n, m]."""
    # An fp32's bits, read as an integer, order like the number once those below the sign are flipped for negative ones.
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = (bits.long() << 32) - ids
    first = keys.sort(-1, descending=True).values if width == keys.shape[1] else keys.topk(width).values
    return -first & 0xFFFFFFFF
