"""The sampler against slow, obvious implementations, and against statistics."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.core.messages.requests import SamplingParams
from engine.model.sample.draws import Filters, draw, draw_sorted, ranked, uniforms
from engine.model.sample.sampler import Sampler
from tests.examples import examples

CPU = torch.device("cpu")
OFF = (0, 1.0, 0.0)
"""Values of top-k, top-p and min-p that filter nothing."""
CHI_SQUARE_19 = 51.1
"""Exceeded once in ten thousand by 19 degrees of freedom."""


def sampler_of(vocab: int, *params: SamplingParams, prompt=(1, 2), generated=(), eos=()) -> tuple[Sampler, list[str]]:
    sampler = Sampler(vocab, CPU, tuple(eos))
    names = [f"request-{i}" for i in range(len(params))]
    for name, one in zip(names, params, strict=True):
        sampler.add(name, one, [*prompt, *generated], len(prompt))
    return sampler, names


def tokens_of(sampler: Sampler, logits: Tensor, names: list[str]) -> list[int]:
    return [sampled.token for sampled in sampler.sample(logits, names)]


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def slow_order(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


def slow_kept(scores: Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """min-p, then top-k, then the smallest nucleus that reaches top-p of the rest. Without filters, tokens by id."""
    if (top_k, top_p, min_p) == OFF:
        return list(range(len(scores)))
    probs = scores.softmax(-1).tolist()
    order = slow_order(scores.tolist())
    left = [token for token in order if probs[token] >= min_p * probs[order[0]]]
    left = left[:top_k] if top_k else left
    mass = 1.0 if len(left) == len(order) and not min_p and not top_k else sum(probs[token] for token in left)
    kept: list[int] = []
    before = 0.0
    for token in left:
        if kept and not before < top_p * mass:
            break
        kept.append(token)
        before += probs[token]
    return kept


def slow_draw(scores: Tensor, uniform: float, kept: list[int]) -> int:
    probs = scores.softmax(-1).tolist()
    target, cumulative = uniform * sum(probs[token] for token in kept), 0.0
    for token in kept:
        cumulative += probs[token]
        if cumulative > target:
            return token
    return kept[-1]


def filters(rows: int, top_k: int, top_p: float, min_p: float) -> Filters:
    return Filters.of([SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)] * rows)


# --- greedy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_the_argmax_in_any_dtype(dtype):
    logits = random_logits(9, 300).to(dtype)
    sampler, names = sampler_of(300, *[SamplingParams(temperature=0)] * 9)
    assert tokens_of(sampler, logits, names) == logits.float().argmax(-1).tolist()


def test_greedy_prefers_the_lowest_id_among_equals():
    logits = torch.zeros(3, 200, dtype=torch.bfloat16)
    logits[:, [7, 50, 199]] = 2.0
    sampler, names = sampler_of(200, *[SamplingParams(temperature=0)] * 3)
    assert tokens_of(sampler, logits, names) == [7, 7, 7]


def test_a_tiny_temperature_is_greedy():
    logits = random_logits(1, 64)
    sampler, names = sampler_of(64, SamplingParams(temperature=1e-6))
    assert tokens_of(sampler, logits, names) == logits.argmax(-1).tolist()


def test_logits_are_left_as_they_were():
    logits = random_logits(2, 64)
    before = logits.clone()
    params = SamplingParams(temperature=0.5, top_p=0.5, repetition_penalty=2.0, logit_bias=((3, 9.0),), min_tokens=3)
    sampler, names = sampler_of(64, params, params, eos=(5,))
    sampler.sample(logits, names)
    assert torch.equal(logits, before)


# --- filters ----------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=examples(150), deadline=None)
def test_filtered_draws_equal_the_obvious_implementation(data):
    vocab = data.draw(st.integers(1, 700), "vocab")
    seed = data.draw(st.integers(0, 2**20), "seed")
    scale = data.draw(st.sampled_from([0.25, 1.0, 4.0]), "scale")
    # Rounding makes ties, which are what orders get wrong.
    scores = (random_logits(1, vocab, seed, scale) * 4).round() / 4
    scores[0, 1 :: data.draw(st.sampled_from([2, 1000]), "forbidden")] = -torch.inf
    top_k = data.draw(st.sampled_from([0, 1, 2, 5, 64, 1000]), "top_k")
    top_p = data.draw(st.sampled_from([0.0, 1e-6, 0.3, 0.9, 0.999, 1.0]), "top_p")
    min_p = data.draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]), "min_p")
    uniform = np.linspace(0, 1, 50, endpoint=False)
    kept = slow_kept(scores[0], top_k, top_p, min_p)
    drawn = draw(scores.expand(50, -1), torch.from_numpy(uniform)[:, None], filters(50, top_k, top_p, min_p))
    assert drawn.tolist() == [slow_draw(scores[0], u, kept) for u in uniform]


def test_a_wide_nucleus_costs_a_few_passes_over_the_row():
    """With a sort, a flat row took fifty times as long as one with few likely tokens."""
    flat = random_logits(8, 100_000, spread=0.1)
    peaked = flat.clone()
    peaked[:, 5_000] = 20.0
    uniform = torch.full((8, 1), 0.99, dtype=torch.float64)

    def cost(scores: Tensor, top_p: float) -> float:
        draw(scores, uniform, filters(8, 0, top_p, 0.0))
        begun = time.process_time()
        draw(scores, uniform, filters(8, 0, top_p, 0.0))
        return time.process_time() - begun

    ratios = [cost(flat, 0.999) / cost(peaked, 0.9) for _ in range(3)]
    assert min(ratios) < 12


def test_a_nucleus_of_equal_tokens_has_those_of_the_lowest_ids():
    scores = torch.zeros(1, 100)
    uniform = torch.full((1, 1), 0.9999, dtype=torch.float64)
    for width in range(1, 101):
        assert draw(scores, uniform, filters(1, 0, width / 100 - 0.005, 0.0)).tolist() == [width - 1]


def test_rows_with_different_filters_in_one_call_keep_their_own():
    scores = random_logits(1, 500, seed=5, spread=2.0)
    wanted = [(1, 1.0, 0.0), (0, 0.4, 0.0), (0, 1.0, 0.2), (40, 0.9, 0.01), (0, 0.9999, 0.0)]
    params = [SamplingParams(top_k=k, top_p=p, min_p=m) for k, p, m in wanted]
    uniform = torch.full((5, 1), 0.97, dtype=torch.float64)
    drawn = draw(scores.expand(5, -1), uniform, Filters.of(params))
    assert drawn.tolist() == [slow_draw(scores[0], 0.97, slow_kept(scores[0], *one)) for one in wanted]


@pytest.mark.parametrize(
    "params", [SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0)], ids=["k", "p", "min"]
)
def test_the_narrowest_filters_are_greedy(params):
    logits = random_logits(1, 1000, seed=3)
    sampler, names = sampler_of(1000, params)
    assert tokens_of(sampler, logits, names) == logits.argmax(-1).tolist()


@given(
    vocab=st.integers(1, 1500),
    width=st.integers(1, 40),
    seed=st.integers(0, 999),
    levels=st.sampled_from([1, 3, 1000]),
    shift=st.sampled_from([0, -50]),
)
@settings(max_examples=examples(80), deadline=None)
def test_ranked_is_the_sorted_order_with_ties_by_id(vocab, width, seed, levels, shift):
    scores = (random_logits(2, vocab, seed) * levels).round() / levels + shift
    scores[1, : vocab // 2] = -torch.inf
    expected = [slow_order(row)[:width] for row in scores.tolist()]
    assert ranked(scores, min(width, vocab)).tolist() == expected


def test_ranked_takes_negative_zero_for_zero():
    scores = torch.tensor([[-0.0, 0.0, -1.0, -0.0, 1.0]])
    assert ranked(scores, 5).tolist() == [[4, 0, 1, 3, 2]]


# --- draws ------------------------------------------------------------------------------------------------------


def chi_square(drawn: np.ndarray, probs: np.ndarray) -> float:
    expected = probs * len(drawn)
    return float(((np.bincount(drawn, minlength=len(probs)) - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 11])
def test_draws_along_a_sequence_follow_the_distribution(seed):
    scores = random_logits(1, 20, seed=1, spread=1.0)
    uniform = uniforms(np.full(20_000, seed, dtype=np.uint64), np.arange(20_000, dtype=np.uint64))
    drawn = draw(scores.expand(20_000, -1), torch.from_numpy(uniform)[:, None], filters(20_000, *OFF)).numpy()
    assert chi_square(drawn, scores.double().softmax(-1)[0].numpy()) < CHI_SQUARE_19


def test_draws_of_neighbouring_seeds_follow_the_distribution_under_a_filter():
    logits = random_logits(1, 400, seed=1, spread=1.0)
    logits[:, 20:] -= 30.0
    params = [SamplingParams(seed=seed, temperature=0.8, top_p=0.999999) for seed in range(4000)]
    sampler, names = sampler_of(400, *params)
    drawn = np.array(tokens_of(sampler, logits.expand(4000, -1), names))
    assert chi_square(drawn, (logits[0, :20].double() / 0.8).softmax(-1).numpy()) < CHI_SQUARE_19


def test_uniforms_of_neighbouring_seeds_and_positions_are_independent():
    grid = uniforms(*np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64), indexing="ij"))
    assert grid.min() >= 0
    assert grid.max() < 1
    for left, right in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        cells = (left * 4).astype(int).ravel() * 5 + (right * 5).astype(int).ravel()
        assert chi_square(cells, np.full(20, 1 / 20)) < CHI_SQUARE_19


def test_no_seed_runs_along_the_positions_of_another():
    """As they would if a seed and the step from one position to the next were merely added."""
    positions = np.arange(50, dtype=np.uint64)
    one = uniforms(np.full(50, 5, dtype=np.uint64), positions)
    other = uniforms(np.full(50, 5 + 0x9E3779B97F4A7C15, dtype=np.uint64), positions)
    assert not set(one) & set(other)


def test_impossible_tokens_are_never_drawn():
    scores = torch.full((3, 10), -torch.inf)
    scores[:, 4] = 0.0
    scores[:, 6] = 0.0
    extremes = torch.tensor([[0.0], [0.5], [1 - 2.0**-52]], dtype=torch.float64)
    assert draw(scores, extremes, filters(3, *OFF)).tolist() == [4, 6, 6]
    assert draw(scores, extremes, filters(3, 9, 1.0, 0.0)).tolist() == [4, 6, 6]


def test_broken_logits_still_give_tokens_of_the_vocabulary():
    logits = torch.full((3, 300), torch.nan)
    sampler, names = sampler_of(300, SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5))
    assert all(0 <= one.token < 300 and not one.is_sound for one in sampler.sample(logits, names))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=3, min_p=0.1)])
def test_an_infinite_logit_wins_and_a_nan_is_never_chosen(params):
    logits = random_logits(2, 300)
    logits[:, 0] = torch.nan
    logits[1, 7] = torch.inf
    sampler, names = sampler_of(300, params, params)
    assert tokens_of(sampler, logits, names) == [int(logits[0, 1:].argmax()) + 1, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_only_rows_without_a_distribution_are_unsound(dtype):
    logits = torch.zeros(5, 300, dtype=dtype)
    logits[0] = 60_000  # whose sum is beyond fp16
    logits[1, 150], logits[2, 3], logits[3, 7], logits[4] = torch.nan, torch.inf, -torch.inf, -torch.inf
    sampler, names = sampler_of(300, *[SamplingParams(temperature=0)] * 5)
    assert [one.is_sound for one in sampler.sample(logits, names)] == [True, False, False, True, False]


# --- reproducibility --------------------------------------------------------------------------------------------

MIXED = (
    SamplingParams(temperature=0),
    SamplingParams(seed=7),
    SamplingParams(seed=7, top_p=0.8),
    SamplingParams(seed=-3, top_k=5, temperature=1.7),
    SamplingParams(seed=2**64 - 1, min_p=0.05, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0, presence_penalty=1.5, logit_bias=((3, 4.0),)),
    SamplingParams(seed=11, top_p=0.999, temperature=3.0, logprobs=2),
    SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(3,), logit_bias=((3, 100.0),)),
)


def run(order: list[int], steps: int, logits: Tensor) -> dict[int, list[int]]:
    """Tokens of each request of MIXED, batched in this order. `logits`: [steps, requests, vocab]."""
    sampler, _ = sampler_of(logits.shape[2])
    for i in order:
        sampler.add(str(i), MIXED[i], [4, 5, 6], 3)
    results: dict[int, list[int]] = {i: [] for i in order}
    for step in range(steps):
        for i, sampled in zip(order, sampler.sample(logits[step, order], [str(i) for i in order]), strict=True):
            results[i].append(sampled.token)
    return results


def test_a_sequence_repeats_itself_in_any_batch():
    logits = torch.stack([random_logits(len(MIXED), 3000, seed) for seed in range(6)])
    together = run(list(range(len(MIXED))), 6, logits)
    assert run(list(reversed(range(len(MIXED)))), 6, logits) == together
    for i in range(len(MIXED)):
        assert run([i], 6, logits) == {i: together[i]}


@given(resume_at=st.integers(1, 5))
@settings(deadline=None)
def test_a_resumed_sequence_repeats_itself(resume_at):
    logits = torch.stack([random_logits(len(MIXED), 500, seed) for seed in range(6)])
    whole = run(list(range(len(MIXED))), 6, logits)
    sampler, _ = sampler_of(500)
    for i, params in enumerate(MIXED):
        sampler.add(str(i), params, [4, 5, 6, *whole[i][:resume_at]], 3)
    names = [str(i) for i in range(len(MIXED))]
    for step in range(resume_at, 6):
        assert tokens_of(sampler, logits[step], names) == [whole[i][step] for i in range(len(MIXED))]


def test_seeds_and_positions_change_the_draw():
    logits = torch.zeros(64, 50_000)
    sampler, names = sampler_of(50_000, *[SamplingParams(seed=seed) for seed in range(64)])
    first, second = tokens_of(sampler, logits, names), tokens_of(sampler, logits, names)
    assert len(set(first)) > 60
    assert first != second


def test_the_same_request_id_can_come_back():
    logits = random_logits(1, 100)
    sampler, names = sampler_of(100, SamplingParams(seed=5))
    first = tokens_of(sampler, logits, names)
    sampler.remove(names[0])
    with pytest.raises(KeyError):
        sampler.sample(logits, names)
    sampler.add(names[0], SamplingParams(seed=5), [1, 2], 2)
    assert tokens_of(sampler, logits, names) == first


# --- penalties, bias, bans --------------------------------------------------------------------------------------


def slow_penalised(row: list[float], params: SamplingParams, prompt: list[int], generated: list[int]) -> list[float]:
    for token in set(prompt + generated):
        factor = 1 / params.repetition_penalty if row[token] > 0 else params.repetition_penalty
        row[token] *= factor
    for token in set(generated):
        row[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    return row


@given(
    prompt=st.lists(st.integers(0, 11), min_size=1, max_size=8),
    generated=st.lists(st.integers(0, 11), max_size=8),
    repetition=st.sampled_from([1.0, 0.7, 1.5]),
    frequency=st.sampled_from([0.0, 0.6, -1.0]),
    presence=st.sampled_from([0.0, 1.1, -2.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(150), deadline=None)
def test_penalties_follow_the_formula(prompt, generated, repetition, frequency, presence, seed):
    params = SamplingParams(
        temperature=0, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    sampler, names = sampler_of(12, params, params, prompt=prompt, generated=generated)
    sequence = list(generated)
    for step in range(5):  # generated tokens join the history
        logits = random_logits(1, 12, seed + step, 2.0).expand(2, -1)
        expected = int(np.argmax(slow_penalised(logits[0].tolist(), params, prompt, sequence)))
        assert tokens_of(sampler, logits, names) == [expected, expected]
        sequence.append(expected)


def test_penalties_of_one_row_leave_the_others_alone():
    logits = torch.zeros(3, 8)
    logits[:, 2], logits[:, 3] = 1.0, 0.9
    params = SamplingParams(temperature=0), SamplingParams(temperature=0, presence_penalty=1.0)
    sampler, names = sampler_of(8, *params, SamplingParams(temperature=0), prompt=(0,), generated=(2,))
    assert tokens_of(sampler, logits, names) == [2, 3, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_bias_forces_and_forbids(temperature):
    logits = random_logits(2, 100, spread=1.0)
    best = int(logits[1].argmax())
    forced = SamplingParams(temperature=temperature, logit_bias=((17, 100.0),))
    forbidden = SamplingParams(temperature=temperature, logit_bias=((best, -100.0),))
    sampler, names = sampler_of(100, forced, forbidden)
    for _ in range(50):
        first, second = tokens_of(sampler, logits, names)
        assert first == 17
        assert second != best


def test_bias_and_stops_beyond_the_vocabulary_are_ignored():
    params = SamplingParams(temperature=0, logit_bias=((100, 50.0), (-1, 50.0)), min_tokens=2, stop_token_ids=(100, -5))
    logits = random_logits(1, 100)
    sampler, names = sampler_of(100, params, eos=(2**31,))
    assert tokens_of(sampler, logits, names) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_min_tokens_bans_stops_until_reached(temperature):
    logits = torch.zeros(1, 40)
    logits[0, [3, 9]] = 60.0
    params = SamplingParams(temperature=temperature, min_tokens=3, stop_token_ids=(9,))
    sampler, names = sampler_of(40, params, eos=(3,))
    tokens = [tokens_of(sampler, logits, names)[0] for _ in range(5)]
    assert not {3, 9} & set(tokens[:3])
    assert set(tokens[3:]) <= {3, 9}


def test_min_tokens_beats_bias():
    params = SamplingParams(temperature=0, min_tokens=1, logit_bias=((3, 100.0),))
    sampler, names = sampler_of(40, params, eos=(3,))
    assert tokens_of(sampler, torch.zeros(1, 40), names) == [0]
    assert tokens_of(sampler, torch.zeros(1, 40), names) == [3]


# --- logprobs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(dtype):
    logits = random_logits(4, 5000, seed=2).to(dtype)
    shaping = {"temperature": 0.3, "repetition_penalty": 1.9, "logit_bias": ((8, 30.0),)}
    params = [
        SamplingParams(logprobs=3, **shaping),
        SamplingParams(logprobs=None),
        SamplingParams(logprobs=0, temperature=0),
        SamplingParams(logprobs=20, temperature=0),
    ]
    sampler, names = sampler_of(5000, *params)
    results = sampler.sample(logits, names)
    reference = torch.log_softmax(logits.float(), -1)
    assert results[1].logprobs is None
    for row, number in ((0, 3), (2, 0), (3, 20)):
        found = results[row].logprobs
        assert found.logprob == pytest.approx(float(reference[row, results[row].token]), abs=1e-6)
        ids = slow_order(logits[row].float().tolist())[:number]
        assert [token for token, _ in found.top] == ids
        assert [value for _, value in found.top] == pytest.approx(reference[row, ids].tolist(), abs=1e-6)
    assert results[0].token == 8
    assert results[3].logprobs.top[0][0] == results[3].token


def test_more_logprobs_than_tokens_are_all_of_them():
    sampler, names = sampler_of(5, SamplingParams(logprobs=9))
    (result,) = sampler.sample(random_logits(1, 5), names)
    assert sorted(token for token, _ in result.logprobs.top) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_machine_without_numba_draws_the_same_by_sorting(temperature):
    scores = torch.randn(60, 3000, generator=torch.Generator().manual_seed(1)) * 4 / temperature
    cases = [
        SamplingParams(top_k=k, top_p=p, min_p=m) for k in (0, 5, 900) for p in (0.3, 0.999, 1.0) for m in (0.0, 0.01)
    ]
    filters = Filters.of([cases[row % len(cases)] for row in range(60)])
    uniform = torch.from_numpy(uniforms(np.arange(60, dtype=np.uint64), np.zeros(60, np.uint64)))[:, None]
    assert draw_sorted(scores, uniform, filters).tolist() == draw(scores, uniform, filters).tolist()
