"""The sampler of a GPU against that of the CPU, under Triton's interpreter. A script of its own, because Triton decides
at import whether kernels are interpreted: start it with TRITON_INTERPRET=1.

Prints one JSON object: check -> null, or the traceback of its failure.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from engine.core.messages.prompt_logprobs import unpack
from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import SampledToken
from engine.model.sample.device_sampler import DeviceSampler, RowUploads
from engine.model.sample.draws import uniforms
from engine.model.sample.masks import TokenMasks, pack_bits
from engine.model.sample.sampler import Sampler
from engine.model.sample.scorer import pack_on_cpu, pack_on_gpu
from lab.without_gpu.interpreter_speed import spare_repeated_work
from lora_kernels.gpu.triton_sampling import SamplingTiles, sample

CPU = torch.device("cpu")
SMALL = SamplingTiles(chunk=64, tile=64)
"""Several chunks and tiles in a small vocabulary."""
EOS = (5,)
PROMPT = [4, 5, 6, 4]

MIXED = (
    SamplingParams(temperature=0),
    SamplingParams(seed=7),
    SamplingParams(seed=7, top_p=0.8),
    SamplingParams(seed=-3, top_k=5, temperature=1.7),
    SamplingParams(seed=2**64 - 1, min_p=0.05, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0, presence_penalty=1.5, logit_bias=((3, 4.0), (9, -2.0))),
    SamplingParams(seed=11, top_p=0.999, temperature=3.0, logprobs=2),
    SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(3,), logit_bias=((3, 100.0),)),
    SamplingParams(seed=5, frequency_penalty=-2.0, repetition_penalty=0.7, logprobs=0),
)


class Pair:
    """Both samplers, told the same; `step` gives what both of them say."""

    def __init__(
        self,
        vocab: int,
        params: Sequence[SamplingParams],
        tokens: Sequence[int] = PROMPT,
        num_prompt: int = len(PROMPT),
        tiles: SamplingTiles = SMALL,
    ) -> None:
        self.plain = Sampler(vocab, CPU, EOS)
        self.device = DeviceSampler(vocab, CPU, EOS, len(params), tiles)
        self.names = [f"request-{i}" for i in range(len(params))]
        for sampler, (name, one) in product((self.plain, self.device), zip(self.names, params, strict=True)):
            sampler.add(name, one, tokens, num_prompt)

    def step(self, logits: Tensor, masks: TokenMasks | None = None) -> tuple[list[SampledToken], list[SampledToken]]:
        before = logits.clone()
        started = self.device.start(logits, self.names, masks)
        ours = started.to_host()
        assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "logits were changed"
        assert started.ids.tolist() == [one.token for one in ours]
        return ours, self.plain.sample(logits, self.names, masks)

    def agree(self, logits: Tensor, masks: TokenMasks | None = None) -> list[int]:
        """The tokens, if both say the same."""
        ours, theirs = ([one.token for one in sampled] for sampled in self.step(logits, masks))
        assert ours == theirs, (ours, theirs)
        return ours


PACKS = (pack_on_gpu, pack_on_cpu)


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def requests_of_every_kind_in_any_dtype() -> None:
    """Odd vocabularies, several steps, histories that grow."""
    for dtype, vocab in ((torch.float32, 301), (torch.bfloat16, 64), (torch.float16, 63)):
        pair = Pair(vocab, MIXED)
        for seed in range(2):
            pair.agree(random_logits(len(MIXED), vocab, seed).to(dtype))


def filters_among_ties() -> None:
    """Scores of few levels: what is kept ends within tokens of one score, and ids decide."""
    kept = product((0, 1, 7, 1000), (1.0, 0.9, 0.3, 0.0), (0.0, 0.02))
    params = [SamplingParams(seed=i, top_k=k, top_p=p, min_p=m) for i, (k, p, m) in enumerate(kept)]
    for levels in (1, 4):
        scores = (random_logits(1, 150, seed=levels, spread=1.5) * levels).round() / levels
        Pair(150, params, tiles=SamplingTiles(chunk=128, tile=128)).agree(scores.expand(len(params), -1))


def filters_wider_than_the_histogram() -> None:
    """One likely token, and so many beyond the reach of bins that a large uniform number falls among them."""
    vocab = 60_000
    draws = uniforms(np.arange(4000, dtype=np.uint64), np.array([len(PROMPT)], dtype=np.uint64))
    seeds = np.argsort(-draws)[:2].tolist()
    filters = {"top_k": vocab - 10}, {"top_k": vocab - 10, "top_p": 0.99999}
    params = [SamplingParams(seed=seed, **kept) for seed, kept in zip(seeds, filters, strict=True)]
    logits = torch.arange(vocab).flip(0) * 1e-6 - 17.0
    logits[123] = 0.0
    tokens = Pair(vocab, params, tiles=SamplingTiles(chunk=8192, tile=8192)).agree(logits.expand(2, -1))
    assert 123 not in tokens


def equal_tokens_are_cut_by_id() -> None:
    """Top-k and top-p keep the tokens with the lowest ids where all tokens are alike."""
    params = [SamplingParams(seed=seed, top_k=4) for seed in range(8)]
    params += [SamplingParams(seed=seed, top_p=0.05) for seed in range(8)]
    tokens = Pair(80, params, tiles=SamplingTiles(chunk=128, tile=128)).agree(torch.zeros(16, 80))
    assert len(set(tokens)) > 2 and set(tokens) <= {0, 1, 2, 3}


def a_single_possible_token() -> None:
    logits = torch.full((len(MIXED), 200), -torch.inf)
    logits[:, 130] = -7.0
    params = [*MIXED[:5], *MIXED[6:7], *MIXED[8:]]
    assert Pair(200, params).agree(logits[: len(params)]) == [130] * len(params)


def broken_logits_still_give_tokens() -> None:
    kinds = SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5, top_k=3)
    for broken in (torch.nan, torch.inf, -torch.inf):
        ours, _ = Pair(90, kinds).step(torch.full((3, 90), broken))
        assert all(0 <= one.token < 90 and not one.is_sound for one in ours)
    logits = random_logits(3, 90)
    logits[:, 40] = torch.inf
    logits[:, 41] = torch.nan
    ours, _ = Pair(90, kinds).step(logits)
    assert [(one.token, one.is_sound) for one in ours] == [(40, False)] * 3


def one_broken_row_is_told_apart() -> None:
    logits = random_logits(4, 200)
    logits[1, 150], logits[2, 3], logits[3, 7] = torch.nan, torch.inf, -torch.inf
    for params in (SamplingParams(temperature=0), SamplingParams(seed=3), SamplingParams(top_k=4)):
        for sampled in Pair(200, [params] * 4).step(logits):
            assert [one.is_sound for one in sampled] == [True, False, False, True]


def extreme_temperatures() -> None:
    temperatures = (1e-6, 1e-5, 1e-3, 50.0, 1e6)
    shapes = ({}, {"top_p": 0.7}, {"top_k": 40}, {"min_p": 0.5})
    params = [SamplingParams(seed=i, temperature=t, **s) for i, (t, s) in enumerate(product(temperatures, shapes))]
    tokens = Pair(130, params).agree(random_logits(1, 130, seed=2).expand(len(params), -1))
    assert set(tokens[:8]) == {int(random_logits(1, 130, seed=2).argmax())}


def histories_are_counted() -> None:
    """Few tokens, strong penalties: every step depends on all before it, those before a preemption too."""
    penalties = {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.4}
    params = [SamplingParams(temperature=0, **penalties), SamplingParams(seed=3, temperature=0.5, **penalties)]
    tokens, pair = [2, 1, 2], Pair(12, params, [2, 1, 2], 3)
    said = [pair.agree(random_logits(2, 12, seed)) for seed in range(8)]
    assert len({step[0] for step in said}) > 3
    for row in range(2):
        known = [*tokens, *(step[row] for step in said[:5])]
        resumed = Pair(12, params[row : row + 1], known, 3)
        assert [resumed.agree(random_logits(2, 12, seed)[row : row + 1])[0] for seed in range(5, 8)] == [
            step[row] for step in said[5:]
        ]


def stops_are_banned_until_min_tokens() -> None:
    logits = torch.zeros(2, 90)
    logits[:, [3, 5, 70]] = 60.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(70, 3)), SamplingParams(min_tokens=3, seed=8)
    pair = Pair(90, params)
    tokens = [pair.agree(logits) for _ in range(4)]
    assert [step[0] for step in tokens[2:]] == [3, 3]
    assert not {70, 3} & {step[0] for step in tokens[:2]}
    assert 5 not in {step[1] for step in tokens[:3]}


def biases_add_up_and_stay_in_the_vocabulary() -> None:
    bias = ((17, 3.0), (17, 4.5), (99, -100.0), (100, 50.0), (-1, 50.0))
    params = [SamplingParams(temperature=t, logit_bias=bias, seed=4) for t in (0.0, 1.0)]
    assert Pair(100, params).agree(torch.zeros(2, 100))[0] == 17


def masked_rows_keep_to_their_masks() -> None:
    """Every second row is held to three tokens that are unlikely; the others are what they are without."""
    for dtype, vocab in ((torch.float32, 301), (torch.bfloat16, 64)):
        logits = random_logits(len(MIXED), vocab).to(dtype)
        allowed = logits.float().argsort(-1)[:, :3]
        rows = tuple(range(0, len(MIXED), 2))
        masks = TokenMasks(rows, np.stack([pack_bits(allowed[row].numpy(), vocab) for row in rows]))
        tokens, free = Pair(vocab, MIXED).agree(logits, masks), Pair(vocab, MIXED).agree(logits)
        assert all(tokens[row] in allowed[row] for row in rows)
        assert tokens[1::2] == free[1::2]
        ours, theirs = Pair(vocab, MIXED).step(logits, masks)
        assert [bool(one.logprobs) for one in ours] == [bool(one.logprobs) for one in theirs]


def masks_are_those_of_their_step() -> None:
    """A single token or several far apart, in other rows in every step, after histories; then none."""
    vocab, pair = 301, Pair(301, MIXED)
    for step in range(4):
        logits, rows = random_logits(len(MIXED), vocab, step), tuple(range(step, len(MIXED), step + 1))
        allowed = {row: np.array([0, 63 + row, 64, 299, 300][row % 5 :]) for row in rows}
        words = np.stack([pack_bits(allowed[row], vocab) for row in rows])
        tokens = pair.agree(logits, TokenMasks(rows, words))
        assert all(tokens[row] in allowed[row] for row in rows)
    pair.agree(random_logits(len(MIXED), vocab, 9))


def masks_are_stronger_than_biases() -> None:
    """No bias, however large, allows what a mask forbids; among the allowed tokens it decides."""
    bias = ((17, 100.0), (40, 50.0))
    params = [SamplingParams(temperature=t, logit_bias=bias, seed=4, top_p=p) for t in (0.0, 1.0) for p in (0.5, 1.0)]
    words = np.stack([pack_bits(np.array([3, 40, 99]), 100)] * len(params))
    assert Pair(100, params).agree(torch.zeros(4, 100), TokenMasks((0, 1, 2, 3), words)) == [40] * 4


def logprobs_are_those_of_the_raw_logits() -> None:
    shaping = {"temperature": 0.3, "repetition_penalty": 1.9, "logit_bias": ((8, 30.0),)}
    params = [SamplingParams(logprobs=number, **shaping) for number in (3, None, 0, 20, 5)]
    for dtype, vocab in ((torch.float32, 301), (torch.bfloat16, 12)):
        logits = random_logits(5, vocab, seed=2).to(dtype)
        logits[3, 4] = -torch.inf
        for ours, theirs in zip(*Pair(vocab, params).step(logits), strict=True):
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            if ours.logprobs is not None:
                assert [i for i, _ in ours.logprobs.top] == [i for i, _ in theirs.logprobs.top]
                assert abs(ours.logprobs.logprob - theirs.logprobs.logprob) < 1e-5
                values = [[value for _, value in one.logprobs.top] for one in (ours, theirs)]
                torch.testing.assert_close(*map(torch.tensor, values), rtol=0, atol=1e-5)


def logprobs_of_prompts_are_those_of_a_cpu() -> None:
    for width in (0, 1, 20):
        for dtype in (torch.float32, torch.bfloat16):
            logits = random_logits(7, 5000, seed=width).to(dtype)
            ids = torch.randint(5000, (7,))
            ids[:3] = logits[:3].argmax(-1)
            ours, theirs = (list(unpack(pack(logits, ids, width).numpy().tobytes(), width)) for pack in PACKS)
            assert [rank for rank, _ in ours] == [rank for rank, _ in theirs]
            assert [rank for rank, _ in ours[:3]] == [1] * 3
            for (_, mine), (_, other) in zip(ours, theirs, strict=True):
                assert [i for i, _ in mine.top] == [i for i, _ in other.top]
                assert not mine.top or abs(mine.top[-1][1] - other.top[-1][1]) < 1e-4
                assert abs(mine.logprob - other.logprob) < 1e-4


def a_row_is_the_same_in_any_batch_and_any_tiles() -> None:
    logits = random_logits(len(MIXED), 301)
    alone, tokens = [], Pair(301, MIXED, tiles=SamplingTiles()).agree(logits)
    for row, one in enumerate(MIXED):
        alone += Pair(301, [one]).agree(logits[row : row + 1])
    assert alone == tokens
    assert Pair(301, MIXED[::-1]).agree(logits.flip(0)) == tokens[::-1]


def draws_follow_seed_and_position() -> None:
    seeds = (0, 1, -1, 2**63 + 11, 2**64 - 1)
    params = [SamplingParams(seed=seed) for seed in seeds]
    pair = Pair(3000, params, tiles=SamplingTiles(chunk=1024, tile=1024))
    tokens = [token for _ in range(4) for token in pair.agree(torch.zeros(len(seeds), 3000))]
    assert len(set(tokens)) == len(tokens) - 4, "seeds -1 and 2**64 - 1 are one"


def padding_is_left_alone() -> None:
    pair = Pair(70, [SamplingParams(temperature=0), SamplingParams(seed=1, top_p=0.9)])
    pair.device._rows = RowUploads(4, 70, CPU)
    logits, slots = random_logits(4, 70), np.full(4, -1, dtype=np.int32)
    slots[:2] = pair.device.slots(pair.names)
    words = pair.device._words.clone()
    rows = pair.device._rows.upload(slots, None)
    host = torch.full((4,), -1)
    ids = sample(logits, rows, pair.device._words, pair.device.last_tokens, host, True, SMALL)
    tokens = [one.token for one in pair.plain.sample(logits[:2], pair.names)]
    assert ids.tolist() == host.tolist() == [*tokens, 0, 0]
    assert pair.device.last_tokens[slots[:2].tolist()].tolist() == tokens
    assert (pair.device._words != words).sum() == 4, "position and count of two slots"


def tokens_of_a_step_stay_while_the_next_is_sampled() -> None:
    pair = Pair(70, [SamplingParams(temperature=0), SamplingParams(temperature=0, logprobs=1)])
    steps = [random_logits(2, 70, seed) for seed in range(3)]
    started = [pair.device.start(logits, pair.names) for logits in steps]
    for logits, sample_of_step in zip(steps, started, strict=True):
        assert [one.token for one in sample_of_step.to_host()] == logits.argmax(1).tolist()


def slots_are_taken_and_given_back() -> None:
    pair = Pair(40, [SamplingParams(temperature=0, presence_penalty=2.0), SamplingParams(seed=6)])
    pair.agree(random_logits(2, 40))
    for name, error in (("another", ValueError), ("request-0", None), ("request-0", KeyError)):
        raised = None
        try:
            if error is ValueError:
                pair.device.add(name, SamplingParams(), [1], 1)
            else:
                pair.device.remove(name)
        except (KeyError, ValueError) as caught:
            raised = type(caught)
        assert raised is error, (name, raised)
    pair.plain.remove("request-0")
    for sampler in (pair.plain, pair.device):
        sampler.add("request-0", SamplingParams(temperature=0), [3], 1)
    pair.agree(random_logits(2, 40))


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        requests_of_every_kind_in_any_dtype,
        filters_among_ties,
        filters_wider_than_the_histogram,
        equal_tokens_are_cut_by_id,
        a_single_possible_token,
        broken_logits_still_give_tokens,
        one_broken_row_is_told_apart,
        extreme_temperatures,
        histories_are_counted,
        stops_are_banned_until_min_tokens,
        biases_add_up_and_stay_in_the_vocabulary,
        masked_rows_keep_to_their_masks,
        masks_are_those_of_their_step,
        masks_are_stronger_than_biases,
        logprobs_are_those_of_the_raw_logits,
        logprobs_of_prompts_are_those_of_a_cpu,
        a_row_is_the_same_in_any_batch_and_any_tiles,
        draws_follow_seed_and_position,
        padding_is_left_alone,
        tokens_of_a_step_stay_while_the_next_is_sampled,
        slots_are_taken_and_given_back,
    )
}


def outcome(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    spare_repeated_work()
    print(json.dumps({name: outcome(check) for name, check in CHECKS.items()}))
