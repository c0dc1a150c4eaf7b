"""Adapters between disk, host memory and device: what is read ahead, what makes room, and what is kept."""

import pytest

from engine.core.commit.adapters import pin_adapter
from engine.core.config import CoreConfig, Scheduling
from engine.core.memory.adapter_eviction import Ranking
from engine.core.memory.adapters import Adapter, HostCopy, begin_of
from engine.core.messages.commands import Abort, AdapterFetched, FetchCancelled, FetchFailed
from engine.core.messages.requests import Cause, ErrorCode
from tests.core.virtual import STEP, SteppedEngine

MIB = 1 << 20


class FetchingEngine(SteppedEngine):
    """Adapters are fetched when `fetch` says so. Each takes as many MiB of host memory as pages."""

    def __init__(self, adapters, host=100, **config):
        super().__init__({}, host_adapter_bytes=host * MIB, **config)
        self.asked = []
        self.executor.fetch = self._note
        self.add(adapters)

    def add(self, adapters):
        for name, pages in adapters.items():
            self.add_adapter(name, pages, pages * MIB)

    def _note(self, plan):
        self.asked += [fetch.adapter_hash for fetch in plan.adapters.fetches]
        self.asked += [f"not {adapter_hash}" for adapter_hash in plan.adapters.cancelled]

    def answer(self, *adapters, kind=AdapterFetched, more=(0.1,)):
        for adapter_hash in adapters:
            self.engine.inbox.put(kind(adapter_hash, *more))

    def warm(self, *adapters):
        """They are used once, each by itself."""
        for adapter_hash in adapters:
            self.submit(f"warm-{adapter_hash}-{self.clock.now}", 20, 2, adapter_hash=adapter_hash)
            self.step()
            self.answer(adapter_hash)
            self.finish()

    def tiers(self):
        """Where each adapter is: d(evice), h(ost), or nowhere."""
        return {
            a.adapter_hash: "d" * a.is_resident + "h" * (a.host is HostCopy.PRESENT)
            for a in self.state.adapters.values()
        }


def test_a_cold_start_takes_one_step_from_host_memory():
    stepped = FetchingEngine({"a": 4, "b": 4}, max_adapter_pages=4)
    stepped.warm("a", "b")
    assert stepped.tiers() == {"a": "h", "b": "dh"}
    stepped.submit("cold", 20, 2, adapter_hash="a")
    stepped.step()
    plan = stepped.executor.plans[-1]
    assert plan.adapters.evicted == ("b",) and [load.adapter_hash for load in plan.adapters.loads] == ["a"]
    assert len(stepped.times["cold"]) == 1


def test_waiting_requests_have_their_adapters_read_in_the_order_they_would_start():
    stepped = FetchingEngine(dict.fromkeys("abcdef", 2), max_seqs=1)
    stepped.submit("busy", 20, 200)
    stepped.step()
    for name in "cabdfe":
        stepped.submit(name, 20, 2, adapter_hash=name)
        stepped.clock.advance(0.001)
    stepped.step()
    assert stepped.asked == ["c", "a", "b", "d"], "as many as may be under way"
    stepped.answer("a")
    stepped.step()
    assert stepped.asked[4:] == ["f"]


def test_only_the_next_few_are_read_ahead():
    stepped = FetchingEngine(dict.fromkeys("abcdef", 2), max_seqs=1, prefetch_window=3)
    stepped.submit("busy", 20, 200)
    stepped.step()
    for number, name in enumerate(("a", None, "b", "c")):
        stepped.submit(f"r{number}", 20, 2, adapter_hash=name)
        stepped.clock.advance(0.001)
    stepped.step(3)
    assert stepped.asked == ["a", "b"]


def test_batch_fetches_leave_one_to_the_interactive_lane():
    stepped = FetchingEngine(dict.fromkeys("abcdefg", 2))
    for name in "abcdef":
        stepped.batch(name, 20, 2, adapter_hash=name)
    stepped.step()
    assert len(stepped.asked) == 3
    stepped.submit("chat", 20, 2, adapter_hash="g")
    stepped.step()
    assert stepped.asked[3:] == ["g"]


def test_a_request_that_waits_for_a_fetch_stops_no_request_behind_it():
    stepped = FetchingEngine({"a": 4, "b": 4})
    stepped.warm("b")
    stepped.submit("waits", 20, 4, adapter_hash="a")
    for name, adapter in (("same", "a"), ("other", "b"), ("base", None)):
        stepped.submit(name, 20, 4, adapter_hash=adapter)
    stepped.step(8)
    assert stepped.asked.count("a") == 1, "one fetch for both"
    assert {"other", "base"} <= stepped.ends.keys() and "waits" not in stepped.times
    stepped.answer("a")
    stepped.finish()
    assert {stepped.reason(name) for name in ("waits", "same")} == {"length"}


def test_a_request_tells_how_long_it_waited_for_its_adapter():
    stepped = FetchingEngine({"a": 4})
    stepped.submit("cold", 20, 2, adapter_hash="a")
    stepped.step()
    stepped.clock.advance(0.5)
    stepped.step()
    stepped.answer("a")
    [admitted] = [event for event in stepped.engine.step() if not event.tokens]
    assert admitted.adapter_wait == pytest.approx(0.5, abs=0.01)
    assert admitted.adapter_wait <= admitted.wait < admitted.adapter_wait + STEP
    stepped.finish()
    for name, adapter in (("warm", "a"), ("base", None)):
        stepped.submit(name, 20, 2, adapter_hash=adapter)
    assert [(event.wait, event.adapter_wait) for event in stepped.engine.step()] == [(0.0, 0.0)] * 4


def test_a_long_queue_of_missing_adapters_is_not_searched_to_its_end(monkeypatch):
    monkeypatch.setattr("engine.core.plan.starts.MOST_PASSED_OVER", 5)
    stepped = FetchingEngine({f"a{number}": 2 for number in range(20)})
    for number in range(20):
        stepped.submit(f"r{number}", 20, 2, adapter_hash=f"a{number}")
        stepped.clock.advance(0.001)
    stepped.submit("base", 20, 2)
    stepped.step(3)
    assert "base" not in stepped.times
    for number in range(16):
        stepped.answer(f"a{number}")
        stepped.step()
    stepped.step(5)
    assert "base" in stepped.times


def test_a_fetch_is_called_off_when_no_request_waits_for_it():
    stepped = FetchingEngine({"a": 4})
    stepped.submit("r", 20, 2, adapter_hash="a")
    stepped.step()
    stepped.engine.inbox.put(Abort("r"))
    stepped.step(3)
    assert stepped.asked == ["a", "not a"]
    assert stepped.state.adapters.held.host_bytes == 4 * MIB, "reserved until the fetcher has let go"
    stepped.submit("again", 20, 2, adapter_hash="a")
    stepped.step(2)
    assert stepped.asked == ["a", "not a"], "first the old one is to be answered"
    stepped.answer("a", kind=FetchCancelled, more=())
    stepped.step()
    assert stepped.asked == ["a", "not a", "a"]
    stepped.answer("a")
    stepped.finish()
    assert stepped.reason("again") == "length"


def test_a_fetch_called_off_too_late_is_kept():
    stepped = FetchingEngine({"a": 4})
    stepped.submit("r", 20, 2, adapter_hash="a")
    stepped.step()
    stepped.engine.inbox.put(Abort("r"))
    stepped.step()
    stepped.answer("a")
    stepped.step()
    assert stepped.tiers() == {"a": "h"}


def test_a_fetch_that_fails_fails_its_own_waiters():
    stepped = FetchingEngine({"a": 4, "b": 4}, fetch_backoff_s=1.0)
    for name, adapter in (("1", "a"), ("2", "a"), ("3", "b"), ("4", None)):
        stepped.submit(name, 20, 4, adapter_hash=adapter)
    stepped.step()
    stepped.answer("a", kind=FetchFailed, more=("it is gone",))
    stepped.answer("b")
    stepped.step()
    failed_at = stepped.clock.now
    for name in "12":
        refusal = stepped.ends[name].refusal
        assert refusal.code is ErrorCode.ADAPTER_UNAVAILABLE
        assert refusal.message == "adapter a cannot be read; its operator sees why"
        assert refusal.retry_after == pytest.approx(1.0, abs=0.05)
    stepped.submit("5", 20, 4, adapter_hash="a")
    stepped.finish()
    assert [stepped.reason(name) for name in "345"] == ["length", "length", "adapter_unavailable"]
    stepped.clock.advance_to(failed_at + 1.1)
    stepped.submit("6", 20, 4, adapter_hash="a")
    stepped.step()
    assert stepped.asked.count("a") == 2


def test_each_failure_doubles_the_pause():
    stepped = FetchingEngine({"a": 4}, fetch_backoff_s=1.0)
    pauses = []
    for number in range(9):
        stepped.submit(f"r{number}", 20, 4, adapter_hash="a")
        stepped.step()
        stepped.answer("a", kind=FetchFailed, more=("it is gone",))
        stepped.step()
        pauses.append(round(stepped.ends[f"r{number}"].refusal.retry_after))
        stepped.clock.advance(pauses[-1] + 1)
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    stepped.submit("good", 20, 4, adapter_hash="a")
    stepped.step()
    stepped.answer("a")
    stepped.finish()
    assert stepped.state.adapters["a"].fetched.failures == 0


def test_host_memory_gives_up_what_is_worth_least():
    stepped = FetchingEngine({"a": 4, "b": 4, "c": 4}, host=8, max_adapter_pages=4)
    stepped.warm("a", "a", "b")
    stepped.warm("c")
    assert stepped.tiers() == {"a": "h", "b": "", "c": "dh"}, "b was used less than a"


def test_a_copy_a_request_waits_for_stays_until_another_has_waited_long():
    stepped = FetchingEngine({"a": 4, "b": 4}, host=4, max_seqs=1, scheduling=Scheduling(adapter_age_s=1.0))
    stepped.submit("busy", 20, 400)
    stepped.step()
    stepped.submit("first", 20, 2, adapter_hash="a")
    stepped.step()
    stepped.answer("a")
    stepped.step()
    stepped.submit("second", 20, 2, adapter_hash="b", priority=-1)
    stepped.step(3)
    assert stepped.asked == ["a"], "it is waited for"
    stepped.clock.advance(1.0)
    stepped.step()
    assert stepped.asked == ["a", "b"], "the one ahead has waited long enough"
    stepped.answer("b")
    stepped.engine.inbox.put(Abort("busy"))
    stepped.run_until(lambda: "second" in stepped.ends)
    stepped.answer("a")
    stepped.finish()
    assert [stepped.reason(name) for name in ("first", "second")] == ["length", "length"]


def test_fetches_of_one_plan_do_not_reserve_the_same_bytes():
    stepped = FetchingEngine({"a": 4, "b": 4}, host=6)
    stepped.submit("1", 20, 2, adapter_hash="a")
    stepped.submit("2", 20, 2, adapter_hash="b")
    stepped.step()
    assert stepped.asked == ["a"]


def test_a_fetch_takes_nothing_from_those_ahead():
    """Though its request has waited long."""
    stepped = FetchingEngine({"a": 4, "b": 4}, host=4, max_seqs=1, scheduling=Scheduling(adapter_age_s=0.0))
    stepped.submit("busy", 20, 400)
    stepped.step()
    stepped.submit("ahead", 20, 2, adapter_hash="a")
    stepped.step()
    stepped.answer("a")
    stepped.submit("behind", 20, 2, adapter_hash="b")
    stepped.step(3)
    assert stepped.asked == ["a"]


def test_popular_adapters_stay_on_the_device():
    stepped = FetchingEngine({"hot": 4, "cold": 4, "new": 4}, max_adapter_pages=8)
    stepped.warm("hot", "hot", "hot", "cold", "new")
    assert stepped.tiers() == {"hot": "dh", "cold": "h", "new": "dh"}


def test_popularity_fades():
    stepped = FetchingEngine({"once": 4, "now": 4, "new": 4}, max_adapter_pages=8, adapter_half_life_s=10.0)
    stepped.warm("once", "once", "once", "once")
    stepped.clock.advance(60.0)
    stepped.warm("now", "new")
    assert stepped.tiers()["once"] == "h"


def test_what_would_have_to_come_from_disk_is_kept_longer():
    stepped = FetchingEngine({"a": 4, "b": 4, "c": 4}, max_adapter_pages=8, host=8)
    stepped.warm("a", "a", "b", "b", "b")
    stepped.add({"big": 8})
    for adapter in ("a", "b"):
        assert stepped.tiers()[adapter] == "dh"
    stepped.state.adapters["b"].host = HostCopy.ABSENT
    stepped.state.adapters.file(stepped.state.adapters["b"])
    assert list(stepped.state.adapters.idle) == ["a", "b"]
    stepped.state.adapters["b"].host, stepped.state.adapters["a"].host = HostCopy.PRESENT, HostCopy.ABSENT
    for adapter in stepped.state.adapters.values():
        stepped.state.adapters.file(adapter)
    assert list(stepped.state.adapters.idle) == ["b", "a"], "though it is the more popular"


def test_rows_of_the_table_are_bounded():
    stepped = FetchingEngine(dict.fromkeys("abc", 2), max_resident_adapters=2)
    for name in "abc":
        stepped.submit(name, 20, 10, adapter_hash=name)
    stepped.step()
    stepped.answer(*"abc")
    stepped.step(3)
    assert stepped.state.adapters.held.adapter_slots == 2
    stepped.finish()
    assert {stepped.reason(name) for name in "abc"} == {"length"}


def test_a_pinned_adapter_stays():
    stepped = FetchingEngine({"pinned": 4, "a": 4, "b": 4}, max_adapter_pages=8)
    stepped.warm("pinned")
    pin_adapter(stepped.state, "pinned", True)
    stepped.warm("a", "a", "b", "b")
    assert stepped.tiers()["pinned"] == "dh"
    pin_adapter(stepped.state, "pinned", False)
    stepped.warm("a", "b")
    assert stepped.tiers()["pinned"] == "h"


def test_a_pinned_adapter_outlives_a_preemption_of_its_last_user():
    stepped = FetchingEngine({"pinned": 8}, num_pages=21)
    stepped.warm("pinned")
    pin_adapter(stepped.state, "pinned", True)
    stepped.batch("b", 100, 60, adapter_hash="pinned")
    stepped.step(3)
    stepped.submit("chat", 150, 2)
    stepped.step()
    assert stepped.state.counters.preempted_for[Cause.PAGES] == 1
    assert stepped.tiers()["pinned"] == "dh" and len(stepped.times["chat"]) == 1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"max_adapter_pages": 9}, "would take 10 pages, and they may take 9"),
        ({"num_pages": 21, "min_kv_pages": 12}, "would take 10 pages, and they may take 8"),
        ({"max_resident_adapters": 1}, "would take 10 pages"),
    ],
)
def test_pins_leave_room(config, reason):
    stepped = FetchingEngine({"a": 5, "b": 5}, **config)
    stepped.step()
    pin_adapter(stepped.state, "a", True)
    with pytest.raises(ValueError, match=reason):
        pin_adapter(stepped.state, "b", True)


def test_pins_leave_what_live_requests_need():
    stepped = FetchingEngine({"a": 5}, num_pages=21, block_size=16)
    stepped.submit("large", 250, 20)
    stepped.step()
    with pytest.raises(ValueError, match="too many for request large; try later"):
        pin_adapter(stepped.state, "a", True)
    stepped.finish()
    pin_adapter(stepped.state, "a", True)
    stepped.submit("large again", 250, 20)
    stepped.finish()
    assert stepped.reason("large again") == "context_length_exceeded"


def test_adapters_leave_kv_its_pages():
    stepped = FetchingEngine(dict.fromkeys("abc", 4), num_pages=21, min_kv_pages=10)
    for name in "abc":
        stepped.submit(name, 20, 30, adapter_hash=name)
    stepped.step()
    stepped.answer(*"abc")
    stepped.step(5)
    assert stepped.state.adapters.held.pages == 8 and len(stepped.state.running) == 2
    stepped.finish()
    assert {stepped.reason(name) for name in "abc"} == {"length"}


def test_an_interactive_adapter_takes_the_pages_of_batch_ones():
    stepped = FetchingEngine({"b1": 4, "b2": 4, "chat": 4}, max_adapter_pages=8)
    stepped.warm("chat", "b1", "b2")
    for name in ("b1", "b2"):
        stepped.batch(name, 20, 200, adapter_hash=name)
    stepped.batch("plain", 20, 200)
    stepped.step(3)
    stepped.submit("now", 20, 4, adapter_hash="chat")
    stepped.step()
    assert len(stepped.times["now"]) == 1
    assert stepped.state.counters.preempted_for[Cause.ADAPTER] == 1


@pytest.mark.parametrize("config", [{"max_adapter_pages": 3}, {"num_pages": 20, "min_kv_pages": 17}, {"host": 3}])
def test_an_adapter_that_can_never_be_used_is_refused(config):
    with pytest.raises(ValueError, match=r"adapter needs"):
        FetchingEngine({"a": 4}, **config).step()


def test_hits_are_starts_that_waited_for_no_copy():
    stepped = FetchingEngine({"a": 4})
    stepped.warm("a", "a", "a")
    adapter = stepped.state.adapters["a"]
    assert (adapter.loaded.hits, adapter.loaded.count, adapter.fetched.count) == (2, 1, 1)


def test_counting_by_growing_weights_orders_as_decay_does():
    old, new = Adapter("old", 1, num_bytes=1), Adapter("new", 1, num_bytes=1)
    for _ in range(3):
        old.start(0.0, half_life=10.0)
    new.start(10.0, half_life=10.0)
    assert old.popularity > new.popularity, "3 / 2 is more than 1"
    new.start(20.0, half_life=10.0)
    assert old.popularity < new.popularity
    new.start(1e9, half_life=10.0)
    assert new.popularity == pytest.approx(1e8)


def test_a_ranking_keeps_its_order():
    ranking = Ranking()
    for name, worth in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("a", 0.0), ("b", None), ("d", float("-inf"))):
        ranking.set(name, worth)
    assert list(ranking) == ["d", "a", "c"] and len(ranking) == 3
    assert "a" in ranking and "b" not in ranking


def test_configurations_that_make_no_sense_are_refused():
    for name in ("max_fetches", "prefetch_window", "adapter_half_life_s"):
        with pytest.raises(ValueError, match=name):
            CoreConfig(num_pages=10, **{name: 0})


def test_batch_adapters_are_read_too():
    stepped = FetchingEngine({"a": 4})
    stepped.batch("b", 20, 4, adapter_hash="a")
    stepped.step()
    stepped.answer("a")
    stepped.finish()
    assert stepped.asked == ["a"] and stepped.reason("b") == "length"


@pytest.mark.parametrize(
    ("invocation", "prompt", "begin"),
    [
        ((), (1, 2), 0),
        ((7,), (7,), 0),
        ((7,), (1, 7, 2, 7, 3), 3),
        ((7, 8), (7, 8, 7, 8, 7), 2),
        ((7, 8), (7, 9, 8), None),
        ((7, 8), (8,), None),
        ((0, 1), (1, 0, 256, 0, 1), 3),
        ((256,), (1, 0, 65536), None),  # its bytes lie across tokens
        ((1,), (0x100, 0x1000000), None),
    ],
)
def test_an_adapter_begins_with_the_last_of_its_invocations(invocation, prompt, begin):
    assert begin_of(invocation, prompt) == begin
