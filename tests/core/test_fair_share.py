"""A tenant that holds more than its share of a lane makes room for the others, and no more than that."""

import pytest

from engine.core.check import leftovers, violations
from engine.core.clearing import MOST_DISPLACED
from engine.core.fair_share import displaceable
from engine.core.types import Lane
from tests.core.virtual import House


def flooded(max_seqs=4, count=20, out=200, **config):
    """All slots are taken by the long answers of one tenant, and more of them wait."""
    house = House(max_seqs=max_seqs, **config)
    house.learn()
    for number in range(count):
        house.submit(f"flood-{number}", 32, out, tenant="flood")
    house.run_until(lambda: len(house.state.running) == max_seqs)
    return house


def tenants(house):
    return sorted(seq.request.tenant for seq in house.state.running.values())


def test_a_newcomer_starts_at_once_beside_a_flood_of_long_answers():
    house = flooded()
    house.submit("chat", 32, 10, tenant="newcomer")
    house.step(3)
    assert house.state.sequences["chat"].num_generated > 0
    assert violations(house.state) == []


def test_tenants_end_up_with_equal_shares_of_the_slots():
    house = flooded()
    for number in range(10):
        house.submit(f"chat-{number}", 32, 200, tenant="newcomer")
    house.step(20)
    assert tenants(house) == ["flood", "flood", "newcomer", "newcomer"]


def test_a_weight_is_a_larger_share():
    house = flooded(max_seqs=8)
    for number in range(20):
        house.submit(f"chat-{number}", 32, 200, tenant="heavy", weight=3.0)
    house.step(30)
    assert tenants(house).count("heavy") == 6


def test_shares_that_have_been_reached_change_no_more():
    house = flooded()
    for number in range(10):
        house.submit(f"chat-{number}", 32, 400, tenant="newcomer")
    house.step(20)
    preempted = house.state.counters.preemptions
    house.step(100)
    assert house.state.counters.preemptions == preempted


def test_more_tenants_than_slots_do_not_displace_each_other_in_turns():
    house = House(max_seqs=4)
    house.learn()
    for number in range(12):
        house.submit(f"chat-{number}", 32, 50, tenant=f"tenant-{number}")
    house.step(200)
    assert house.state.counters.preemptions == 0


def test_pages_count_as_slots_do():
    house = House(max_seqs=32, num_pages=100, max_model_len=800)
    house.learn()
    for number in range(2):
        house.submit(f"flood-{number}", 600, 150, tenant="flood")
    house.step(30)
    assert len(house.state.running) == 2
    house.submit("chat", 400, 10, tenant="newcomer")
    house.step(10)
    assert tenants(house) == ["flood", "newcomer"]


@pytest.mark.parametrize(("out", "prompt", "answer"), [(300, 700, 60), (600, 400, 200)])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_flood_that_grows_takes_no_pages_back(out, prompt, answer, prefix_caching):
    house = House(max_seqs=32, num_pages=100, max_model_len=1000, prefix_caching=prefix_caching)
    house.learn()
    for number in range(60):
        house.submit(f"flood-{number}", 16, out, tenant="flood")
    house.step(30)
    house.submit("chat", prompt, answer, tenant="newcomer")
    house.step(1)
    chat = house.state.sequences["chat"]
    house.run_until(lambda: "chat" in house.ends)
    assert chat.num_preemptions <= 3
    assert violations(house.state) == []


def test_a_request_larger_than_its_share_ends_and_does_not_take_for_ever():
    house = House(max_seqs=32, num_pages=100, max_model_len=1100)
    house.learn()
    for number in range(20):
        house.submit(f"flood-{number}", 100, 900, tenant="flood")
    house.step(30)
    house.submit("chat", 900, 100, tenant="newcomer")
    house.step(1)
    chat = house.state.sequences["chat"]
    house.finish()
    assert chat.num_preemptions <= 5
    assert leftovers(house.state) == []


def test_one_plan_displaces_a_bounded_number():
    house = flooded(max_seqs=64, count=80, num_pages=2000, token_budget=2048)
    for number in range(60):
        house.submit(f"chat-{number}", 16, 50, tenant="newcomer")
    house.step(30)
    assert max(len(plan.preempted) for plan in house.executor.plans) <= MOST_DISPLACED


def test_batch_work_takes_nothing_from_other_batch_work():
    house = House(max_seqs=2)
    house.learn()
    for number in range(4):
        house.batch(f"b{number}", 32, 100, tenant="flood")
    house.step(10)
    house.batch("late", 32, 10, tenant="newcomer")
    house.step(5)
    assert house.state.counters.preemptions == 0


@pytest.mark.parametrize("chats", [1, 7])
def test_everything_ends_and_nothing_is_left(chats):
    house = flooded(count=10, out=60)
    for number in range(chats):
        house.submit(f"chat-{number}", 32, 30, tenant="newcomer")
    house.finish()
    assert {house.reason(name) for name in house.ends} == {"length"}
    assert leftovers(house.state) == []


def test_a_flood_may_not_displace_itself():
    house = flooded()
    waiting = next(iter(house.state.waiting))
    assert list(displaceable(house.state, waiting)) == []
    assert waiting.lane is Lane.INTERACTIVE
