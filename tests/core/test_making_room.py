"""Which sequences are preempted, by checkpoint, swap or recomputation, and what the caches keep for them."""

import pytest

from engine.core.config import Scheduling
from engine.core.memory.host_tier import HostTier
from engine.core.messages.requests import Cause, Lane
from engine.core.policy.preemption import cheapest_first
from engine.core.watch.check import leftovers
from tests.core.virtual import SteppedEngine


def crowded(preemption, **config):
    """A pool full of batch work, some way into its answers."""
    defaults = {"num_pages": 80, "host_pages": 100, "scheduling": Scheduling(preemption=preemption)}
    stepped = SteppedEngine(**defaults | config)
    stepped.learn()
    for number in range(12):
        stepped.batch(f"b{number}", 100, 120)
    stepped.step(60)
    return stepped


@pytest.mark.parametrize("preemption", ["recompute", "swap", "checkpoint"])
def test_each_way_of_yielding(preemption):
    stepped = crowded(preemption, prefix_caching=False)
    saved = stepped.state.counters.kv.saved
    for number in range(4):
        stepped.submit(f"chat{number}", 150, 10)
    stepped.step(1)
    plan, counters = stepped.executor.plans[-1], stepped.state.counters
    assert len(plan.preempted) > 0
    assert (len(plan.saves) > 2) == (preemption == "swap"), "only a swap copies when it yields"
    assert saved > 0 if preemption == "checkpoint" else preemption == "swap" or saved == 0
    stepped.finish()
    assert (counters.kv.restored > 0) == (preemption != "recompute")
    lost = counters.recomputed_tokens / sum(counters.preempted_for.values())
    assert lost > 90 if preemption == "recompute" else lost < 40
    assert leftovers(stepped.state) == []


def test_checkpoints_are_a_few_pages_a_step_and_batch_work_only():
    stepped = crowded("checkpoint")
    stepped.submit("chat", 200, 40)
    stepped.step(20)
    kept = [{copy.page for copy in plan.saves} - {*plan.dropped_cache} for plan in stepped.executor.plans]
    assert all(len(pages) <= 2 for pages in kept)
    assert stepped.state.sequences["chat"].prefix.num_saved == 0
    assert any(seq.prefix.num_saved for seq in stepped.state.sequences.values())


@pytest.mark.slow
def test_a_full_host_gives_up_the_oldest_copies_and_costs_only_time():
    stepped = crowded("checkpoint", host_pages=6)
    for number in range(6):
        stepped.submit(f"chat{number}", 150, 10)
        stepped.step(5)
    stepped.finish()
    assert {stepped.reason(name) for name in stepped.ends} == {"length"}


def test_the_preempted_are_resumed_before_new_work():
    stepped = crowded("swap")
    for number in range(5):
        stepped.batch(f"fresh{number}", 100, 120)
    stepped.submit("chat", 900, 2)
    stepped.step(1)
    victims = set(stepped.executor.plans[-1].preempted)
    fresh = {seq.id for seq in stepped.state.waiting} - victims
    assert victims and fresh
    stepped.run_until(lambda: any(a.request_id in victims for p in stepped.executor.plans[-1:] for a in p.admitted))
    assert fresh <= {seq.id for seq in stepped.state.waiting}


def test_the_thrashed_and_the_nearly_done_are_spared():
    stepped = crowded("recompute")
    running = [seq for seq in stepped.state.running.values() if seq.lane is Lane.BATCH]
    tired, nearly = running[0], running[1]
    tired.preempted.times = 3
    nearly.tokens.extend([1] * (220 - len(nearly.tokens)))
    assert {seq.id for seq in cheapest_first(stepped.state, running)[-2:]} == {tired.id, nearly.id}


@pytest.mark.parametrize(
    ("cause", "config", "chat"),
    [
        (Cause.SLOT, {"max_seqs": 2}, {"prompt": 20}),
        (Cause.PAGES, {"num_pages": 36}, {"prompt": 250}),
        (Cause.ADAPTER, {"num_pages": 36}, {"prompt": 20, "adapter_hash": "b"}),
    ],
)
@pytest.mark.parametrize("tenant", ["acme", "globex"])
def test_an_interactive_request_takes_whatever_it_needs_also_from_its_own_tenants_batch(cause, config, chat, tenant):
    stepped = SteppedEngine({"a": 12, "b": 12}, **config)
    for number in range(2):
        stepped.batch(f"b{number}", 100, 60, adapter_hash="a", tenant="acme")
    stepped.step(6)
    stepped.submit("chat", out=2, tenant=tenant, **chat)
    stepped.step(2)
    assert stepped.state.counters.preempted_for[cause] >= 1
    assert sum(stepped.state.counters.preempted_for.values()) == stepped.state.counters.preempted_for[cause]
    assert "chat" in stepped.times
    stepped.finish()
    assert {stepped.reason(name) for name in stepped.ends} == {"length"}


def chat_then_batch(stepped, hold):
    stepped.submit("chat", range(160), 2)
    stepped.finish()
    stepped.clock.advance(hold)
    for number in range(8):
        stepped.batch(f"b{number}", 120, 40)
    stepped.finish()
    stepped.submit("again", range(160), 2)
    stepped.finish()
    return stepped.ends["again"].num_cached


def test_batch_work_does_not_push_out_an_interactive_prefix():
    rules = Scheduling(hold_s=60.0)
    assert chat_then_batch(SteppedEngine(num_pages=40, scheduling=rules), 1.0) == 144
    assert chat_then_batch(SteppedEngine(num_pages=40, scheduling=rules), 61.0) == 0, "but one that has decayed"


def test_prefixes_are_kept_from_batch_work_up_to_a_share_of_the_pool():
    stepped = SteppedEngine(num_pages=41, scheduling=Scheduling(hold_share=0.25))
    for number in range(3):
        stepped.submit(f"chat{number}", range(number * 1000, number * 1000 + 160), 2)
        stepped.finish()
    assert len(stepped.state.prefix.idle[Lane.INTERACTIVE]) == 10


def test_a_batch_request_starts_though_everything_is_kept():
    stepped = SteppedEngine(num_pages=20, scheduling=Scheduling(hold_share=1.0))
    stepped.submit("chat", range(260), 2)
    stepped.finish()
    stepped.batch("b", 250, 4)
    stepped.finish()
    assert stepped.reason("b") == "length"


def test_an_interactive_match_lifts_a_batch_page():
    stepped = SteppedEngine(num_pages=60)
    stepped.batch("b", range(100), 2)
    stepped.finish()
    assert len(stepped.state.prefix.idle[Lane.INTERACTIVE]) == 0
    stepped.submit("chat", range(100), 2)
    stepped.finish()
    assert len(stepped.state.prefix.idle[Lane.INTERACTIVE]) == 6


@pytest.mark.slow
def test_a_large_batch_request_and_those_behind_it_are_served_beside_chats_that_come_back():
    """Half the pool is kept for prefixes that are used again and again; the request needs more than the other half."""
    stepped = SteppedEngine(num_pages=101, max_seqs=16)
    stepped.learn()
    for number in range(6):
        stepped.submit(f"warm{number}", range(number * 500, number * 500 + 130), 4)
        stepped.finish()
    stepped.batch("large", 900, 8)
    for number in range(3):
        stepped.batch(f"small{number}", 30, 8)
    for number in range(120):
        stepped.submit(f"chat{number}", range(number % 6 * 500, number % 6 * 500 + 130), 30)
        stepped.step(12)
    assert {"large", "small0", "small1", "small2"} <= stepped.ends.keys()


@pytest.mark.slow
def test_a_batch_adapter_that_cannot_fit_beside_chats_stops_no_other_request():
    stepped = SteppedEngine({"chats": 40, "batches": 40}, num_pages=61, max_seqs=8)
    stepped.learn()
    stepped.batch("stuck", 20, 4, adapter_hash="batches")
    for number in range(60):
        stepped.submit(f"chat{number}", 20, 40, adapter_hash="chats")
        stepped.batch(f"b{number}", 20, 4)
        stepped.step(20)
    done = sum(name.startswith("b") for name in stepped.ends)
    assert done > 30


def test_a_failed_start_leaves_the_prefix_it_would_have_shared():
    stepped = SteppedEngine(num_pages=60, scheduling=Scheduling(hold_s=1000.0))
    stepped.submit("first", range(320), 2)
    stepped.finish()
    for number in range(2):
        stepped.submit(f"busy{number}", 200, 60)
    stepped.step(2)
    stepped.submit("again", range(700), 2)
    for number in range(3):
        stepped.batch(f"b{number}", 60, 10)
    stepped.step(5)
    held = stepped.state.prefix.idle[Lane.INTERACTIVE]
    assert "again" not in stepped.times and len(held) >= 19


@pytest.mark.parametrize("host_pages", [0, 200])
def test_prefixes_that_the_device_has_no_room_for_are_restored_from_the_host(host_pages):
    """Twelve conversations of 160 tokens take turns, and the device has pages for seven of them."""
    stepped = SteppedEngine(num_pages=80, host_pages=host_pages)
    stepped.learn()
    before = stepped.state.counters.cached_tokens
    for turn in range(4):
        for user in range(12):
            stepped.submit(f"{turn}-{user}", [user] * 160 + [turn], 1)
            stepped.finish()
    cached = stepped.state.counters.cached_tokens - before
    assert cached == (36 * 160 if host_pages else 0)
    assert leftovers(stepped.state) == []


def test_host_pages_are_reused_in_order():
    """Idle copies come first, the oldest use before others; then those that live sequences need; never leased ones."""
    tier = HostTier(6)
    for page, key in enumerate(b"a b c d e f".split()):
        tier.put(key, page)
    tier.need([b"a", b"b", b"b2"])
    tier.lease(b"c")
    tier.lease(b"b")
    tier.touch([b"d"])
    assert list(tier.reusable(needed=False)) == [b"e", b"f", b"d"]
    assert list(tier.reusable(needed=True)) == [b"e", b"f", b"d", b"a"]
    tier.end_lease([b"c", b"b"])
    tier.end_need([b"a", b"b2"])
    assert list(tier.reusable(needed=False)) == [b"a", b"e", b"f", b"d", b"c"], "the ended sequence's copy is first"
    assert tier.reserve(9) == [0, 4, 5, 3, 2] and list(tier.page_of) == [b"b"]
    tier.unreserve([0, 4])
    assert list(tier.free) == [0, 4] and tier.reserved == {2, 3, 5}
