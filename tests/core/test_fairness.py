"""Tenants inside a lane: weighted shares, no saving up, locality within a quantum, adapters nobody keeps for ever."""

import pytest

from engine.core.config import Scheduling
from engine.core.report import lane_reports, tenant_reports
from engine.core.types import Lane
from tests.core.virtual import House


def backlog(house, tenant, count, lane=Lane.BATCH, prompt=32, out=40, **fields):
    for number in range(count):
        house.submit(f"{tenant}-{number}", prompt, out, lane, tenant=tenant, **fields)


def seconds(house, lane=Lane.BATCH):
    return {report.tenant: report.device_seconds for report in tenant_reports(house.state) if report.lane is lane}


def test_a_flood_does_not_crowd_out_a_trickle():
    house = House(max_seqs=4)
    house.learn()
    backlog(house, "flood", 100)
    house.step(20)
    backlog(house, "trickle", 10)
    before = seconds(house)
    house.run_until(lambda: sum(name.startswith("trickle") for name in house.ends) == 10)
    got = {tenant: seconds(house)[tenant] - before.get(tenant, 0.0) for tenant in ("flood", "trickle")}
    assert got["flood"] < 1.6 * got["trickle"], "they share alike while both wait"


@pytest.mark.parametrize("lane", list(Lane))
def test_weights_are_shares(lane):
    house = House(max_seqs=6)
    house.learn()
    backlog(house, "light", 100, lane, weight=1.0)
    backlog(house, "heavy", 100, lane, weight=3.0)
    before = seconds(house, lane)
    house.step(600)
    got = {tenant: seconds(house, lane)[tenant] - before.get(tenant, 0.0) for tenant in ("light", "heavy")}
    assert 2.4 < got["heavy"] / got["light"] < 3.8


def test_who_comes_back_has_saved_nothing_up():
    house = House(max_seqs=4)
    house.learn()
    backlog(house, "steady", 200)
    house.step(400)
    backlog(house, "sleeper", 50)
    before = seconds(house)
    house.step(200)
    got = {tenant: seconds(house)[tenant] - before.get(tenant, 0.0) for tenant in ("steady", "sleeper")}
    assert got["steady"] > 0.4 * got["sleeper"]


def test_the_gap_between_counters_stays_within_half_the_bound():
    house = House(max_seqs=4)
    house.learn()
    for number, (prompt, out) in enumerate([(16, 10), (200, 10), (16, 150)]):
        backlog(house, f"t{number}", 60, prompt=prompt, out=out)
    worst = 0.0
    for _ in range(1500):
        house.step()
        report = lane_reports(house.state, house.clock.now)[Lane.BATCH]
        worst = max(worst, report.gap / report.bound)
    assert 0 < worst <= 0.5


def test_a_preempted_tenant_does_not_pay_for_what_is_computed_again():
    house = House(max_seqs=2, scheduling=Scheduling(preemption="recompute", watermark=0.0), prefix_caching=False)
    house.learn()
    house.batch("victim", 200, 30, tenant="victim")
    house.run_until(lambda: len(house.times.get("victim", [])) > 5)
    account = house.ledger.accounts.get(Lane.BATCH, "victim")
    served, used = account.served, account.seconds
    for number in range(2):
        house.submit(f"chat{number}", 20, 10, tenant="chat")
    house.run_until(lambda: len(house.ends) > 27)
    house.finish()
    assert house.state.sequences == {} and house.state.counters.recomputed_tokens > 200
    assert account.served - served < 0.85 * (account.seconds - used)


def test_priorities_order_a_tenant_and_age():
    house = House(max_seqs=1, scheduling=Scheduling(priority_s=10.0))
    house.submit("running", 20, 200)
    house.step(2)
    house.submit("old", 20, 2, priority=1)
    house.clock.advance(5.0)
    house.submit("soon", 20, 2, priority=0)
    house.clock.advance(6.0)
    house.submit("late", 20, 2, priority=0)
    house.finish()
    assert sorted(("old", "soon", "late"), key=lambda name: house.times[name][0]) == ["soon", "old", "late"]


@pytest.mark.parametrize(("tokens", "goes_first"), [(10, "second"), (100, "first")])
def test_a_resident_adapter_goes_first_within_half_of_the_goal(tokens, goes_first):
    """While 100 tokens are generated, 0.5 s are half over."""
    house = House({"here": 4, "away": 4}, max_seqs=1)
    house.learn()
    house.submit("warm", 20, tokens, adapter_hash="here")
    house.step(3)
    house.submit("first", 20, 2, adapter_hash="away")
    house.submit("second", 20, 2, adapter_hash="here")
    house.finish()
    assert min(("first", "second"), key=lambda name: house.times[name][0]) == goes_first


def test_who_waits_too_long_for_an_adapter_gets_it():
    """Room for one adapter only, and an endless stream of requests for the one that has it."""
    house = House({"here": 30, "away": 30}, num_pages=60, max_seqs=4, scheduling=Scheduling(adapter_age_s=0.5))
    house.learn()
    house.submit("warm", 20, 30, adapter_hash="here")
    house.step(5)
    house.submit("patient", 20, 4, adapter_hash="away")
    asked = house.clock.now
    for number in range(200):
        house.submit(f"stream{number}", 20, 30, adapter_hash="here")
        house.step(6)
        if "patient" in house.ends:
            break
    assert "patient" in house.ends
    assert house.times["patient"][0] - asked < 0.5 + 1.5
    house.finish()


def test_requests_for_other_adapters_pass_one_that_finds_no_room():
    house = House({"here": 30, "away": 30}, num_pages=60, max_seqs=4, scheduling=Scheduling(adapter_age_s=100.0))
    house.learn()
    house.submit("warm", 20, 200, adapter_hash="here")
    house.step(5)
    house.submit("blocked", 20, 4, adapter_hash="away")
    house.submit("free", 20, 4, adapter_hash="here")
    house.submit("base", 20, 4)
    house.run_until(lambda: "free" in house.ends and "base" in house.ends)
    assert "blocked" not in house.times
    house.finish()
    assert house.reason("blocked") == "length"


def test_siblings_share_the_prompt_instead_of_computing_it_again():
    house = House(num_pages=400)
    house.learn()
    prompt = range(1000, 1161)
    before = house.state.counters.cached_tokens
    for number in range(4):
        house.submit(f"n{number}", prompt, 8)
    house.finish()
    assert house.state.counters.cached_tokens - before == 3 * 160
    computed = sum(c.num_tokens for p in house.executor.plans for c in p.chunks if c.request_id.startswith("n"))
    assert computed == 161 + 3 * 1 + 4 * 7
