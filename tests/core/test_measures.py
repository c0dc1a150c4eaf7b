"""What the core counts for metrics: sizes of steps, prompt tokens when they are computed, and how fast batch work
yields."""

import pytest

from engine.core.config import Scheduling
from engine.core.messages.requests import Lane
from engine.core.state.engine_state import Buckets
from tests.core.virtual import SteppedEngine


def test_buckets_have_inclusive_upper_bounds():
    buckets = Buckets((1, 2, 4))
    for value in (0, 1, 2, 3, 4, 5, 100):
        buckets.add(value)
    assert (buckets.counts, buckets.sum) == ([2, 1, 2, 2], 115)


def test_steps_are_counted_by_their_sequences_and_tokens():
    stepped = SteppedEngine()
    for name in "abc":
        stepped.submit(name, 30, 4)
    stepped.finish()
    counters = stepped.state.counters
    assert (counters.step_sequences.sum, counters.step_tokens.sum) == (3 * 4, 3 * (30 + 3))
    assert sum(counters.step_sequences.counts) == sum(counters.step_tokens.counts) == 4


@pytest.mark.parametrize("overlaps", [False, True])
def test_prompt_tokens_count_once_when_they_are_computed(overlaps):
    rules = Scheduling(preemption="recompute")
    stepped = SteppedEngine(num_pages=31, max_seqs=4, token_budget=64, scheduling=rules, overlaps=overlaps)
    counters = stepped.state.counters
    stepped.batch("long", 300, 100)
    stepped.step()
    assert 0 < counters.prompt_tokens < 300
    stepped.run_until(lambda: counters.generated_tokens > 4)
    assert counters.prompt_tokens == 300
    stepped.submit("chat", 400, 20)
    stepped.submit("refused", 2000, 20)
    stepped.finish()
    assert counters.recomputed_tokens
    stepped.submit("again", range(7000, 7100), 4)
    stepped.finish()
    stepped.submit("cached", range(7000, 7100), 4)
    stepped.finish()
    assert (counters.prompt_tokens, counters.cached_tokens) == (300 + 400 + 2 * 100, 96)


def test_yielding_is_measured_where_only_batch_work_delays():
    stepped = SteppedEngine({"a": 2}, max_seqs=8)
    measured = stepped.state.counters.yield_seconds
    stepped.submit("alone", 20, 4)
    stepped.finish()
    for number in range(8):
        stepped.batch(f"b{number}", 32, 200)
    stepped.step(4)
    assert not measured.sum
    arrived = stepped.clock.now
    stepped.clock.advance(0.003)
    stepped.submit("chat", 20, 4, arrival=arrived)
    stepped.submit("behind it", 20, 4, arrival=arrived)
    stepped.submit("needs an adapter", 20, 4, adapter_hash="a", arrival=arrived)
    stepped.step(2)
    assert stepped.state.counters.preempted_in[Lane.BATCH] >= 1
    assert (sum(measured.counts), measured.sum) == (1, pytest.approx(0.003))
