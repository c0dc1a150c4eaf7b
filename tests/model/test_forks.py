"""Four answers of one prompt equal four requests with the same seeds, in fp32 on a real model."""

from dataclasses import replace

import pytest
from test_preemption import BIG_CORE, VOCAB, Arrival, Schedule, adapter_folders, compare, run, small_core  # noqa: F401

from engine.core.messages.requests import Lane, Request, SamplingParams
from engine.model.memory.arena import Arena

PROMPT = tuple(range(5, 28))
"""23 tokens: five pages of four, and two tokens that are copied with their page."""
SCHEDULE = Schedule((), num_pages=30, host_pages=12, max_seqs=6, token_budget=24, prefix_caching=True)


def arrivals(adapter):
    """Yield four answers in the batch lane, and chats that take their pages."""
    for seed in range(4):
        params = SamplingParams(12, temperature=0.9, seed=seed, ignore_eos=True, logprobs=VOCAB)
        yield Arrival(0, Request(f"answer {seed}", PROMPT, params, adapter, Lane.BATCH))
    for step in (7, 30):
        params = SamplingParams(4, temperature=0.0, ignore_eos=True, logprobs=2)
        yield Arrival(step, Request(f"chat {step}", tuple(range(30, 68)), params, arrival=step / 1000))


@pytest.fixture
def copied(monkeypatch):
    """Return the list of the numbers of pages that each call of `Arena.fork` copied."""
    numbers, fork = [], Arena.fork
    monkeypatch.setattr(Arena, "fork", lambda arena, forks: numbers.append(len(forks)) or fork(arena, forks))
    return numbers


def test_four_answers_equal_four_requests(tiny_llama, adapter_folders, copied):  # noqa: F811
    schedule = replace(SCHEDULE, arrivals=tuple(arrivals("x")))
    alone, _ = run(tiny_llama, adapter_folders, schedule, replace(BIG_CORE, max_seqs=1, prefix_caching=False))
    assert copied == []
    for preemption, overlaps in (("recompute", True), ("swap", False), ("checkpoint", True)):
        copied.clear()
        core = small_core(schedule, preemption)
        streams, counters = run(tiny_llama, adapter_folders, schedule, core, overlaps)
        counts = compare(schedule, alone, streams)
        assert counts["decided"] > 0.5 * counts["tokens"]
        assert counters.preemptions and sum(copied) >= 3
