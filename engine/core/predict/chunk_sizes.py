"""Solves for the largest prefill chunk that a step has time for, by the prices of the step-time model."""

from __future__ import annotations

from math import inf, sqrt

from engine.core.messages.features import StepFeatures
from engine.core.predict.step_time import StepTimeModel

MOST_TOKENS = 1 << 30
"""Number of tokens that stands for no limit: the size that fits if a chunk's tokens cost nothing."""


def chunk_that_fits(
    model: StepTimeModel, features: StepFeatures, start: int, rank: int, seconds: float, *, scores: bool = False
) -> int:
    """Return the size in tokens of the largest prefill chunk that can be added to a step within `seconds`.

    Args:
        features: the work that the step already has.
        start: position of the chunk's first token.
        rank: rank of the chunk's adapter, which is assumed to be new in the step; 0 without one.
        seconds: maximum predicted duration of the whole step.
        scores: whether logprobs of the chunk's tokens are computed.
    """
    price, before = _linear_price(model, start, rank, scores=scores), int(features.tokens)
    room = seconds - model.predict(features) - (model.prices.adapter if rank else 0.0)
    fits = min(_with_experts(model, features.tokens, price, room), MOST_TOKENS)
    if features.launched or not model.is_launched(1, before + fits):
        return fits
    launched = _with_experts(model, features.tokens, price, room - model.prices.launch)
    return max(launched, _largest_replayed(model, before + fits) - before)


def _linear_price(model: StepTimeModel, start: int, rank: int, *, scores: bool) -> float:
    """Return the part of a token's price, in seconds, that does not depend on the size of its chunk: the token itself,
    attention to the `start` tokens before the chunk, LoRA of this rank and, with `scores`, logprobs."""
    prices = model.prices
    scored = prices.scored if scores else 0.0
    return prices.prefill + prices.attention * start + prices.lora_row * rank + scored


def _largest_replayed(model: StepTimeModel, tokens: int) -> int:
    """Return the largest number of tokens, at most `tokens`, for which a step with prompts is expected to be replayed
    as a captured graph, not launched kernel by kernel; 0 if there is none."""
    while tokens and model.is_launched(1, tokens):
        tokens = (1 << (tokens.bit_length() - 1)) - 1
    return tokens


def _with_experts(model: StepTimeModel, tokens: float, price: float, room: float) -> int:
    """Return how many tokens of a prefill chunk, of `price` seconds each and more for attention within the chunk, can
    be added to a step of `tokens` tokens within `room` seconds, including the time for reading the experts of a MoE
    model that only the added tokens choose."""
    if not model.prices.experts:
        return _without_experts(model, tokens, price, room)
    room += model.experts_s(tokens)

    def beside(chunk: float) -> int:
        """Return how many tokens the chunk can have if its step reads as many experts as with `chunk` added tokens."""
        return _without_experts(model, tokens, price, room - model.experts_s(tokens + chunk))

    low = beside(inf)  # as if the chunk read all experts: no more fit than beside those that these tokens read
    high = beside(low)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if beside(middle) >= middle else (low, middle - 1)
    return low


def _without_experts(model: StepTimeModel, tokens: float, price: float, room: float) -> int:
    """Return how many tokens of a prefill chunk, of `price` seconds each and more for attention within the chunk, can
    be added to a step of `tokens` tokens within `room` seconds, without the time for reading experts."""
    attention = model.prices.attention
    square, done = attention / 2, 0
    for knot in (*[k for k in model.knots if k > tokens], MOST_TOKENS):
        slope = price + model.token_price(tokens + done + 1) + attention * done
        fits = _solve(square, slope, room)
        if tokens + done + fits <= knot:
            return done + fits
        length = knot - int(tokens) - done
        room -= length * (slope + square * length)
        done += length
    return done


def _solve(square: float, slope: float, room: float) -> int:
    """Return the length in tokens of the longest chunk that costs at most `room` seconds: the largest integer x >= 0
    with square * x**2 + slope * x <= room, for non-negative coefficients; 0 if `room` is negative, and `MOST_TOKENS` if
    both coefficients are 0."""
    if room <= 0:
        return 0
    if square * room < 1e-6 * slope * slope:
        return int(room / slope)
    if square == 0:
        return MOST_TOKENS
    return int((sqrt(slope * slope + 4 * square * room) - slope) / (2 * square))
