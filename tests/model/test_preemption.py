"""Preempted streams equal undisturbed ones: a real model in fp32, under schedules of interruptions drawn at random."""

from collections import Counter
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_adapters import save_adapter

from engine.config import EngineConfig
from engine.core.config import PREEMPTIONS, CoreConfig, Scheduling
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Lane, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from engine.model.sample.draws import uniforms
from tests.examples import examples

VOCAB, BLOCK = 97, 4
HOST_PAGES = 12
PAGE_BYTES = 2 * 2 * BLOCK * 2 * 16 * 4  # layers, K and V, tokens, heads, elements of a head, bytes of one
RANKS = {"x": 2, "y": 5}
BIG_CORE = CoreConfig(num_pages=256, block_size=BLOCK, max_seqs=16, max_model_len=128, token_budget=64)
GREEDY_MARGIN, DRAW_MARGIN = 1e-3, 1e-5
"""A likeliest token this much (of a logprob) ahead of the next, and a draw this far from where another token would have
been drawn, are beyond what rounding moves: a product of matrices rounds by their shapes, and what else is in the batch
moves logprobs of this model by up to 5e-6."""


@dataclass(frozen=True)
class Arrival:
    step: int
    request: Request


@dataclass(frozen=True)
class Schedule:
    """What arrives when, and how little room there is for it."""

    arrivals: tuple
    num_pages: int
    host_pages: int
    max_seqs: int
    token_budget: int
    prefix_caching: bool


@pytest.fixture(scope="module")
def adapter_folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for name, rank in RANKS.items():
        save_adapter(folder / name, rank, seed=rank)
    return {name: folder / name for name in RANKS}


@st.composite
def arrivals(draw, name, lane, steps, max_tokens):
    """Adapters by name, to be replaced by their ids."""
    sampled = draw(st.booleans())
    params = SamplingParams(
        max_tokens=draw(max_tokens),
        temperature=0.9 if sampled else 0.0,
        seed=draw(st.integers(0, 1000)),
        ignore_eos=True,
        logprobs=VOCAB if sampled else 2,
    )
    prompt = draw(st.lists(st.integers(4, VOCAB - 1), min_size=1, max_size=26))
    head = (5,) * draw(st.sampled_from((0, 0, 9)))  # prompts that share a prefix
    step, adapter_hash = draw(steps), draw(st.sampled_from((None, *RANKS)))
    return Arrival(step, Request(name, (*head, *prompt), params, adapter_hash, lane, arrival=step / 1000))


@st.composite
def schedules(draw):
    """A few long batch requests, interrupted by interactive ones that need what they hold: slots, pages, adapters."""
    batch = [
        draw(arrivals(f"b{i}", Lane.BATCH, st.integers(0, 3), st.integers(12, 24)))
        for i in range(draw(st.integers(3, 5)))
    ]
    interactive = [
        draw(arrivals(f"i{i}", Lane.INTERACTIVE, st.integers(2, 40), st.integers(1, 8)))
        for i in range(draw(st.integers(2, 6)))
    ]
    max_seqs = draw(st.integers(2, 4))
    return Schedule(
        arrivals=tuple(sorted((*batch, *interactive), key=lambda arrival: arrival.step)),
        num_pages=draw(st.integers(24, 34)),
        host_pages=draw(st.integers(1, HOST_PAGES)),
        max_seqs=max_seqs,
        token_budget=draw(st.integers(max_seqs, 24)),
        prefix_caching=draw(st.booleans()),
    )


def run(model, adapter_folders, schedule, core, overlaps=False, **options):
    """({request id: (token, logprobs) of each token}, counters) of a fresh engine whose memory is full of garbage."""
    config = EngineConfig(
        str(model),
        dtype="float32",
        device="cpu",
        block_size=BLOCK,
        num_pages=core.num_pages,
        swap_gb=(HOST_PAGES + 0.5) * PAGE_BYTES / 2**30,
        max_seqs=core.max_seqs,
        threads=1,
        **options,
    )
    runner, ticks = ModelRunner(load(config)), iter(range(10**9))
    runner.overlaps = overlaps
    runner.loaded.arena.pages[1:] = 1e4
    runner.loaded.host_pages.pages[:] = 1e4
    engine = Engine(EngineState.create(core), runner, clock=lambda: next(ticks) / 1000)
    versions = {name: engine.load_adapter(str(folder)).adapter_hash for name, folder in adapter_folders.items()}
    streams = {arrival.request.id: [] for arrival in schedule.arrivals}
    for step in range(5000):
        for arrival in schedule.arrivals:
            if arrival.step == step:
                adapter_hash = versions.get(arrival.request.adapter_hash)
                engine.inbox.put(Submit(arrival.request._replace(adapter_hash=adapter_hash)))
        for event in engine.step():
            assert event.refusal is None
            streams[event.request_id] += zip(event.tokens, event.logprobs, strict=True)
        assert violations(engine.state) == []
        if step > schedule.arrivals[-1].step and not engine.state.has_work:
            break
    assert leftovers(engine.state) == []
    assert not runner.loaded.arena.pages[0].any()
    return streams, engine.state.counters


def num_decided(stream, request):
    """How many leading tokens of a stream no rounding can have chosen."""
    for index, (_, logprobs) in enumerate(stream):
        if request.params.temperature == 0:
            margin = logprobs.top[0][1] - logprobs.top[1][1] - GREEDY_MARGIN
        else:
            margin = draw_margin(logprobs.top, request.params, len(request.prompt_ids) + index) - DRAW_MARGIN
        if margin < 0:
            return index
    return len(stream)


def draw_margin(logprobs, params, position):
    """How far the draw at a position is from the nearest bound between two tokens, as a probability."""
    scores = np.array([logprob for _, logprob in sorted(logprobs)]) / params.temperature
    bounds = np.cumsum(np.exp(scores) / np.exp(scores).sum())
    uniform = uniforms(np.array([params.seed], np.uint64), np.array([position], np.uint64))
    return np.abs(bounds - uniform).min()


def test_preempted_streams_equal_undisturbed_ones(tiny_llama, adapter_folders):
    """One undisturbed run of a schedule is compared with preempted ones of every kind, in turn and ahead."""
    kinds = list(product(PREEMPTIONS, (False, True)))
    totals = {kind: Counter() for kind in kinds}

    @settings(max_examples=examples(6), deadline=None)
    @given(schedule=schedules())
    def check(schedule):
        undisturbed, calm = run(tiny_llama, adapter_folders, schedule, BIG_CORE)
        assert calm.preemptions == 0
        for preemption, overlaps in kinds:
            core, found = small_core(schedule, preemption), totals[preemption, overlaps]
            streams, counters = run(tiny_llama, adapter_folders, schedule, core, overlaps)
            found.update(preemptions=counters.preemptions)
            found.update(restored=counters.kv.restored, saved=counters.kv.saved)
            found.update(compare(schedule, undisturbed, streams))

    check()
    for (preemption, _), found in totals.items():
        assert found["preemptions"] > 0
        assert found["decided"] > 0.5 * found["tokens"]  # 0.85 to 1, as requests are drawn: most were compared
        if preemption == "recompute":
            assert (found["saved"], found["restored"]) == (0, 0)
    swapped = sum((found for (preemption, _), found in totals.items() if preemption != "recompute"), Counter())
    assert swapped["saved"] > 0
    assert swapped["restored"] > 0  # of every kind, as requests are drawn, in most runs


def compare(schedule, undisturbed, streams):
    """Check that streams say what undisturbed ones say, and return how many tokens were decided, of how many."""
    counts = Counter()
    for request in (arrival.request for arrival in schedule.arrivals):
        expected, stream = undisturbed[request.id], streams[request.id]
        decided = num_decided(expected, request)
        assert len(stream) == len(expected) == request.params.max_tokens
        assert [token for token, _ in stream[:decided]] == [token for token, _ in expected[:decided]]
        counts.update(decided=decided, tokens=len(expected))
    return counts


def small_core(schedule, preemption):
    return CoreConfig(
        num_pages=schedule.num_pages,
        block_size=BLOCK,
        host_pages=schedule.host_pages,
        max_seqs=schedule.max_seqs,
        max_model_len=64,
        token_budget=schedule.token_budget,
        prefix_caching=schedule.prefix_caching,
        scheduling=Scheduling(preemption=preemption),
    )
