"""Who yields, in which of three ways, and what the caches keep for whom."""

import pytest

from engine.core.check import leftovers
from engine.core.config import Scheduling
from engine.core.types import Cause, Lane
from engine.core.victims import cheapest_first
from tests.core.virtual import House


def crowded(preemption, **config):
    """A pool full of batch work, some way into its answers."""
    defaults = {"num_pages": 80, "host_pages": 100, "scheduling": Scheduling(preemption=preemption)}
    house = House(**defaults | config)
    house.learn()
    for number in range(12):
        house.batch(f"b{number}", 100, 120)
    house.step(60)
    return house


@pytest.mark.parametrize("preemption", ["recompute", "swap", "checkpoint"])
def test_each_way_of_yielding(preemption):
    house = crowded(preemption, prefix_caching=False)
    saved = house.state.counters.pages_saved
    for number in range(4):
        house.submit(f"chat{number}", 150, 10)
    house.step(1)
    plan, counters = house.executor.plans[-1], house.state.counters
    assert len(plan.preempted) > 0
    assert (len(plan.saves) > 2) == (preemption == "swap"), "only a swap copies when it yields"
    assert saved > 0 if preemption == "checkpoint" else preemption == "swap" or saved == 0
    house.finish()
    assert (counters.pages_restored > 0) == (preemption != "recompute")
    lost = counters.recomputed_tokens / sum(counters.preempted_for.values())
    assert lost > 90 if preemption == "recompute" else lost < 40
    assert leftovers(house.state) == []


def test_checkpoints_are_a_few_pages_a_step_and_batch_work_only():
    house = crowded("checkpoint")
    house.submit("chat", 200, 40)
    house.step(20)
    assert all(len(plan.saves) <= 2 for plan in house.executor.plans)
    assert house.state.sequences["chat"].num_saved == 0
    assert any(seq.num_saved for seq in house.state.sequences.values())


def test_a_full_host_gives_up_the_oldest_copies_and_costs_only_time():
    house = crowded("checkpoint", host_pages=6)
    for number in range(6):
        house.submit(f"chat{number}", 150, 10)
        house.step(5)
    house.finish()
    assert {house.reason(name) for name in house.ends} == {"length"}


def test_the_preempted_are_resumed_before_new_work():
    house = crowded("swap")
    for number in range(5):
        house.batch(f"fresh{number}", 100, 120)
    house.submit("chat", 900, 2)
    house.step(1)
    victims = set(house.executor.plans[-1].preempted)
    fresh = {seq.id for seq in house.state.waiting} - victims
    assert victims and fresh
    house.run_until(lambda: any(a.request_id in victims for p in house.executor.plans[-1:] for a in p.admitted))
    assert fresh <= {seq.id for seq in house.state.waiting}


def test_the_thrashed_and_the_nearly_done_are_spared():
    house = crowded("recompute")
    running = [seq for seq in house.state.running.values() if seq.lane is Lane.BATCH]
    tired, nearly = running[0], running[1]
    tired.num_preemptions = 3
    nearly.tokens.extend([1] * (220 - len(nearly.tokens)))
    assert {seq.id for seq in cheapest_first(house.state, running)[-2:]} == {tired.id, nearly.id}


@pytest.mark.parametrize(
    ("cause", "config", "chat"),
    [
        (Cause.SLOT, {"max_seqs": 2}, {"prompt": 20}),
        (Cause.PAGES, {"num_pages": 36}, {"prompt": 250}),
        (Cause.ADAPTER, {"num_pages": 36}, {"prompt": 20, "adapter_hash": "b"}),
    ],
)
def test_an_interactive_request_takes_whatever_it_needs(cause, config, chat):
    house = House({"a": 12, "b": 12}, **config)
    for number in range(2):
        house.batch(f"b{number}", 100, 60, adapter_hash="a")
    house.step(6)
    house.submit("chat", out=2, **chat)
    house.step(2)
    assert house.state.counters.preempted_for[cause] >= 1
    assert sum(house.state.counters.preempted_for.values()) == house.state.counters.preempted_for[cause]
    assert "chat" in house.times
    house.finish()
    assert {house.reason(name) for name in house.ends} == {"length"}


def chat_then_batch(house, hold):
    house.submit("chat", range(160), 2)
    house.finish()
    house.clock.advance(hold)
    for number in range(8):
        house.batch(f"b{number}", 120, 40)
    house.finish()
    house.submit("again", range(160), 2)
    house.finish()
    return house.ends["again"].num_cached


def test_batch_work_does_not_push_out_an_interactive_prefix():
    rules = Scheduling(hold_s=60.0)
    assert chat_then_batch(House(num_pages=40, scheduling=rules), 1.0) == 144
    assert chat_then_batch(House(num_pages=40, scheduling=rules), 61.0) == 0, "but one that has decayed"


def test_prefixes_are_kept_from_batch_work_up_to_a_share_of_the_pool():
    house = House(num_pages=41, scheduling=Scheduling(hold_share=0.25))
    for number in range(3):
        house.submit(f"chat{number}", range(number * 1000, number * 1000 + 160), 2)
        house.finish()
    assert len(house.state.prefix.idle[Lane.INTERACTIVE]) == 10


def test_a_batch_request_starts_though_everything_is_kept():
    house = House(num_pages=20, scheduling=Scheduling(hold_share=1.0))
    house.submit("chat", range(260), 2)
    house.finish()
    house.batch("b", 250, 4)
    house.finish()
    assert house.reason("b") == "length"


def test_an_interactive_match_lifts_a_batch_page():
    house = House(num_pages=60)
    house.batch("b", range(100), 2)
    house.finish()
    assert len(house.state.prefix.idle[Lane.INTERACTIVE]) == 0
    house.submit("chat", range(100), 2)
    house.finish()
    assert len(house.state.prefix.idle[Lane.INTERACTIVE]) == 6


def test_a_large_batch_request_and_those_behind_it_are_served_beside_chats_that_come_back():
    """Half the pool is kept for prefixes that are used again and again; the request needs more than the other half."""
    house = House(num_pages=101, max_seqs=16)
    house.learn()
    for number in range(6):
        house.submit(f"warm{number}", range(number * 500, number * 500 + 130), 4)
        house.finish()
    house.batch("large", 900, 8)
    for number in range(3):
        house.batch(f"small{number}", 30, 8)
    for number in range(120):
        house.submit(f"chat{number}", range(number % 6 * 500, number % 6 * 500 + 130), 30)
        house.step(12)
    assert {"large", "small0", "small1", "small2"} <= house.ends.keys()


def test_a_batch_adapter_that_cannot_fit_beside_chats_stops_nobody_else():
    house = House({"chats": 40, "batches": 40}, num_pages=61, max_seqs=8)
    house.learn()
    house.batch("stuck", 20, 4, adapter_hash="batches")
    for number in range(60):
        house.submit(f"chat{number}", 20, 40, adapter_hash="chats")
        house.batch(f"b{number}", 20, 4)
        house.step(20)
    done = sum(name.startswith("b") for name in house.ends)
    assert done > 30


def test_a_failed_start_leaves_the_prefix_it_would_have_shared():
    house = House(num_pages=60, scheduling=Scheduling(hold_s=1000.0))
    house.submit("first", range(320), 2)
    house.finish()
    for number in range(2):
        house.submit(f"busy{number}", 200, 60)
    house.step(2)
    house.submit("again", range(700), 2)
    for number in range(3):
        house.batch(f"b{number}", 60, 10)
    house.step(5)
    held = house.state.prefix.idle[Lane.INTERACTIVE]
    assert "again" not in house.times and len(held) >= 19
