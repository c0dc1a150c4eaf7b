"""Answers with proposed tokens equal those without: a real model in fp32, base and adapters, greedy and seeded."""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from test_preemption import BIG_CORE, HOST_PAGES, VOCAB, Arrival, Schedule, num_decided, run
from tiny_adapters import save_adapter

from engine.core.commit import apply
from engine.core.config import PREEMPTIONS, Scheduling
from engine.core.messages.requests import Lane, Request, SamplingParams
from engine.core.messages.step import SampledToken
from engine.core.plan import proposals
from engine.core.speculate.proposer import Guess
from engine.model.sample.sampler import Sampler

PROMPT = (5, 9, 17, 40, 61, 22, 5, 9, 17, 33, 12, 5, 9, 17, 40, 61)
LOGPROB_NOISE = 1e-4
TIGHT_CORES = [
    replace(BIG_CORE, num_pages=36, max_seqs=4, host_pages=HOST_PAGES, scheduling=Scheduling(preemption=preemption))
    for preemption in PREEMPTIONS
]


@pytest.fixture(scope="module")
def adapter_folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for name, rank in {"x": 2, "y": 5}.items():
        save_adapter(folder / name, rank, seed=rank)
    return {name: folder / name for name in "xy"}


class Recorded:
    """A proposer that knows an answer, and is wrong at every sixth place."""

    def __init__(self, request, stream):
        self.start, self.answer = len(request.prompt_ids), [token for token, _ in stream]

    def learn(self, tokens, most):
        pass

    def end(self, tokens):
        pass

    def propose(self, tokens, most):
        first = len(tokens) - self.start
        places = range(first, min(first + most, len(self.answer)))
        return Guess(tuple(self.answer[place] if place % 6 else 4 for place in places), "recorded")


def everything(state, guesses, budget, tokens):
    """Compute four proposals of every sequence: as `proposals._worthwhile` where rows cost nothing."""
    return {seq: min(4, len(guess.tokens)) for seq, guess in guesses.items()}


def asked():
    """Requests of every kind at the same time: greedy and drawn ones, of the base model and two adapters."""
    for number in range(9):
        temperature = (0.0, 0.3, 0.9)[number // 3]
        params = SamplingParams(30, temperature=temperature, seed=number, ignore_eos=True, logprobs=VOCAB)
        prompt = (*PROMPT, number + 4) if number % 3 else PROMPT
        yield Request(f"r{number}", prompt, params, (None, "x", "y")[number % 3], Lane(number % 2))


SCHEDULE = Schedule(tuple(Arrival(number % 4, request) for number, request in enumerate(asked())), 0, 0, 0, 0, True)


@pytest.fixture(scope="module")
def plain(tiny_llama, adapter_folders):
    """Return {request id: (token, logprobs) of each token} without proposals."""
    return run(tiny_llama, adapter_folders, SCHEDULE, BIG_CORE)[0]


@pytest.mark.parametrize(
    "core", [BIG_CORE, *TIGHT_CORES], ids=lambda core: f"{core.num_pages} {core.scheduling.preemption}"
)
def test_tokens_and_logprobs_are_the_same_with_proposals(core, plain, tiny_llama, adapter_folders):
    chooses = patch.object(proposals, "_worthwhile", everything)
    with chooses, patch.object(apply, "proposer_for", lambda _, request, __: Recorded(request, plain[request.id])):
        found, counters = run(tiny_llama, adapter_folders, SCHEDULE, replace(core, speculation=True))
    assert (counters.preemptions > 0) == (core is not BIG_CORE)
    # Every sixth guess is wrong: at worst, the first of every second chunk of four.
    assert counters.proposed_tokens / 2 <= counters.accepted_tokens < counters.proposed_tokens
    totals = Counter()
    for request in asked():
        expected, stream = plain[request.id], found[request.id]
        decided = num_decided(expected, request)
        assert len(stream) == len(expected)
        assert [token for token, _ in stream[:decided]] == [token for token, _ in expected[:decided]]
        for (_, one), (_, other) in zip(expected[:decided], stream[:decided], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=LOGPROB_NOISE)
            assert dict(one.top) == pytest.approx(dict(other.top), abs=LOGPROB_NOISE)
        totals.update(decided=decided, tokens=len(expected))
    assert totals["decided"] > 0.6 * totals["tokens"]


def test_an_answer_that_repeats_itself_takes_fewer_steps(tiny_llama, adapter_folders):
    """The proposer and the choice as they are served: a strong bias makes the answer repeat a few tokens."""
    params = SamplingParams(90, temperature=0.0, logit_bias=((7, 50.0),), ignore_eos=True, logprobs=1)
    schedule = Schedule((Arrival(0, Request("r", PROMPT, params)),), 0, 0, 0, 0, True)
    streams, counters = run(tiny_llama, adapter_folders, schedule, replace(BIG_CORE, speculation=True))
    assert [token for token, _ in streams["r"]] == [7] * 90
    assert counters.accepted_tokens > 20
    assert counters.steps < 80


def test_a_row_is_sampled_at_its_own_place():
    """Draws, the ban of stop tokens before `min_tokens`, and the history follow the accepted proposals."""
    logits, eos = torch.randn(12, 50, generator=torch.Generator().manual_seed(0)), (3, 4)
    params = SamplingParams(max_tokens=20, min_tokens=6, temperature=1.0, seed=11, logprobs=1)
    plain, verifying = (Sampler(50, torch.device("cpu"), eos) for _ in range(2))
    for sampler in (plain, verifying):
        sampler.add("r", params, [1, 2], 2)
        sampler.add("other", params._replace(seed=5, frequency_penalty=0.5), [1], 1)
    one_by_one = [plain.sample(logits[i : i + 1], ["r"])[0] for i in range(12)]
    tokens = [one.token for one in one_by_one]
    proposed = {"r": (*tokens[:3], (tokens[3] + 1) % 50, tokens[4])}
    ids = ["r"] * 6
    found = verifying.sample(torch.cat([logits[:6], logits[:1]]), [*ids, "other"], proposals=proposed)
    assert found[:4] == one_by_one[:4]
    assert [one.request_id for one in found] == ["r"] * 4 + ["other"]
    (after,) = verifying.sample(logits[4:5], ["r"])
    assert isinstance(after, SampledToken)
    assert after.token == tokens[4]
    assert verifying.sample(logits[5:7], ["r", "r"], proposals={"r": (tokens[5],)}) == one_by_one[5:7]
