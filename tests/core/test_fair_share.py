"""A tenant that holds more than its share of a lane makes room for the others, and no more than that."""

import pytest

from engine.core.messages.commands import Abort
from engine.core.messages.requests import Lane
from engine.core.plan.clearing import MOST_DISPLACED
from engine.core.policy.fair_share import displaceable
from engine.core.watch.check import leftovers, violations
from tests.core.virtual import SteppedEngine


def flooded(max_seqs=4, count=20, out=200, **config):
    """All slots are taken by the long answers of one tenant, and more of them wait."""
    stepped = SteppedEngine(max_seqs=max_seqs, **config)
    stepped.learn()
    for number in range(count):
        stepped.submit(f"flood-{number}", 32, out, tenant="flood")
    stepped.run_until(lambda: len(stepped.state.running) == max_seqs)
    return stepped


def tenants(stepped):
    return sorted(seq.request.tenant for seq in stepped.state.running.values())


def test_a_newcomer_starts_at_once_beside_a_flood_of_long_answers():
    stepped = flooded()
    stepped.submit("chat", 32, 10, tenant="newcomer")
    stepped.step(3)
    assert stepped.state.sequences["chat"].num_generated > 0
    assert violations(stepped.state) == []


def test_tenants_end_up_with_equal_shares_of_the_slots():
    stepped = flooded()
    for number in range(10):
        stepped.submit(f"chat-{number}", 32, 200, tenant="newcomer")
    stepped.step(20)
    assert tenants(stepped) == ["flood", "flood", "newcomer", "newcomer"]


def test_a_weight_is_a_larger_share():
    stepped = flooded(max_seqs=8)
    for number in range(20):
        stepped.submit(f"chat-{number}", 32, 200, tenant="heavy", weight=3.0)
    stepped.step(30)
    assert tenants(stepped).count("heavy") == 6


def test_shares_that_have_been_reached_change_no_more():
    stepped = flooded()
    for number in range(10):
        stepped.submit(f"chat-{number}", 32, 400, tenant="newcomer")
    stepped.step(20)
    preempted = stepped.state.counters.preemptions
    stepped.step(100)
    assert stepped.state.counters.preemptions == preempted


def test_more_tenants_than_slots_do_not_displace_each_other_in_turns():
    stepped = SteppedEngine(max_seqs=4)
    stepped.learn()
    for number in range(12):
        stepped.submit(f"chat-{number}", 32, 50, tenant=f"tenant-{number}")
    stepped.step(200)
    assert stepped.state.counters.preemptions == 0


def test_pages_count_as_slots_do():
    stepped = SteppedEngine(max_seqs=32, num_pages=100, max_model_len=800)
    stepped.learn()
    for number in range(2):
        stepped.submit(f"flood-{number}", 600, 150, tenant="flood")
    stepped.step(30)
    assert len(stepped.state.running) == 2
    stepped.submit("chat", 400, 10, tenant="newcomer")
    stepped.step(10)
    assert tenants(stepped) == ["flood", "newcomer"]


@pytest.mark.parametrize(("out", "prompt", "answer"), [(300, 700, 60), (600, 400, 200)])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_flood_that_grows_takes_no_pages_back(out, prompt, answer, prefix_caching):
    stepped = SteppedEngine(max_seqs=32, num_pages=100, max_model_len=1000, prefix_caching=prefix_caching)
    stepped.learn()
    for number in range(60):
        stepped.submit(f"flood-{number}", 16, out, tenant="flood")
    stepped.step(30)
    stepped.submit("chat", prompt, answer, tenant="newcomer")
    stepped.step(1)
    chat = stepped.state.sequences["chat"]
    stepped.run_until(lambda: "chat" in stepped.ends)
    assert chat.preempted.times <= 3
    assert violations(stepped.state) == []


@pytest.mark.slow
def test_a_request_larger_than_its_share_ends_and_does_not_take_for_ever():
    stepped = SteppedEngine(max_seqs=32, num_pages=100, max_model_len=1100)
    stepped.learn()
    for number in range(20):
        stepped.submit(f"flood-{number}", 100, 400, tenant="flood")
    stepped.step(30)
    stepped.submit("chat", 900, 100, tenant="newcomer")
    stepped.step(1)
    chat = stepped.state.sequences["chat"]
    stepped.run_until(lambda: "chat" in stepped.ends)
    assert chat.preempted.times <= 5
    for number in range(20):
        stepped.engine.inbox.put(Abort(f"flood-{number}"))
    stepped.finish()
    assert leftovers(stepped.state) == []


def test_one_plan_displaces_a_bounded_number():
    stepped = flooded(max_seqs=64, count=80, num_pages=2000, token_budget=2048)
    for number in range(60):
        stepped.submit(f"chat-{number}", 16, 50, tenant="newcomer")
    stepped.step(30)
    assert max(len(plan.preempted) for plan in stepped.executor.plans) <= MOST_DISPLACED


def test_batch_work_takes_nothing_from_other_batch_work():
    stepped = SteppedEngine(max_seqs=2)
    stepped.learn()
    for number in range(4):
        stepped.batch(f"b{number}", 32, 100, tenant="flood")
    stepped.step(10)
    stepped.batch("late", 32, 10, tenant="newcomer")
    stepped.step(5)
    assert stepped.state.counters.preemptions == 0


@pytest.mark.parametrize("chats", [1, 7])
def test_everything_ends_and_nothing_is_left(chats):
    stepped = flooded(count=10, out=60)
    for number in range(chats):
        stepped.submit(f"chat-{number}", 32, 30, tenant="newcomer")
    stepped.finish()
    assert {stepped.reason(name) for name in stepped.ends} == {"length"}
    assert leftovers(stepped.state) == []


def test_a_flood_may_not_displace_itself():
    stepped = flooded()
    waiting = next(iter(stepped.state.waiting))
    assert list(displaceable(stepped.state, waiting)) == []
    assert waiting.lane is Lane.INTERACTIVE
