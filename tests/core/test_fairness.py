"""Tenants inside a lane: weighted shares, no saving up, locality within a quantum, no adapter kept for ever."""

import pytest

from engine.core.config import LaneGoals, Scheduling
from engine.core.fairness.accounts import RECENT_S
from engine.core.messages.requests import Lane
from engine.core.watch.report import lane_reports, tenant_reports
from tests.core.virtual import SteppedEngine


def backlog(stepped, tenant, count, lane=Lane.BATCH, prompt=32, out=40, **fields):
    for number in range(count):
        stepped.submit(f"{tenant}-{number}", prompt, out, lane, tenant=tenant, **fields)


def seconds(stepped, lane=Lane.BATCH):
    return {report.tenant: report.device_seconds for report in tenant_reports(stepped.state) if report.lane is lane}


def test_a_flood_does_not_crowd_out_a_trickle():
    stepped = SteppedEngine(max_seqs=4)
    stepped.learn()
    backlog(stepped, "flood", 100)
    stepped.step(20)
    backlog(stepped, "trickle", 10)
    before = seconds(stepped)
    stepped.run_until(lambda: sum(name.startswith("trickle") for name in stepped.ends) == 10)
    got = {tenant: seconds(stepped)[tenant] - before.get(tenant, 0.0) for tenant in ("flood", "trickle")}
    assert got["flood"] < 1.6 * got["trickle"], "they share alike while both wait"


def test_a_chat_waits_for_no_prompt_of_another_tenant():
    """The last part of a running prompt, which is short by then, once took every step before the chat."""
    stepped = SteppedEngine(num_pages=4000, max_model_len=2048, interactive=LaneGoals(ttft_s=0.5, itl_s=0.04))
    stepped.learn()
    backlog(stepped, "flood", 30, Lane.INTERACTIVE, 1500, 1)
    waits = []
    for number in range(30):
        stepped.step(3)
        name, begun = f"chat-{number}", stepped.clock.now
        stepped.submit(name, 40, 4, tenant="neighbour")
        stepped.run_until(lambda name=name: name in stepped.ends)
        waits.append(stepped.times[name][0] - begun)
    assert max(waits) < 3 * 0.04
    assert any(name.startswith("flood") for name in stepped.ends), "the prompts advance beside the chats"


def test_a_prompt_that_takes_long_stays_one_of_two_tenants():
    """After 10 s, the tenant of the long prompt counted as gone, and its steps between two chats took seconds."""
    stepped = SteppedEngine(num_pages=4000, max_model_len=64_000, interactive=LaneGoals(ttft_s=0.5, itl_s=0.04))
    stepped.learn()
    stepped.submit("long", 60_000, 1, tenant="flood")
    stepped.run_until(lambda: stepped.clock.now > 2 * RECENT_S)
    for number in range(3):
        stepped.submit(f"chat-{number}", 40, 4, tenant="neighbour")
        stepped.step(20)
        assert f"chat-{number}" in stepped.ends and "long" not in stepped.ends
        assert max(stepped.executor.took[-10:]) <= 0.04


def test_a_chat_that_takes_long_was_active_until_its_end():
    stepped = SteppedEngine(num_pages=4000, max_model_len=64_000, interactive=LaneGoals(ttft_s=0.5, itl_s=0.04))
    stepped.learn()
    stepped.submit("chat", 40, 400, tenant="neighbour")
    stepped.submit("long", 60_000, 1, tenant="flood")
    stepped.run_until(lambda: "chat" in stepped.ends)
    assert stepped.clock.now - stepped.times["chat"][0] > RECENT_S
    stepped.step(20)
    assert "long" not in stepped.ends and max(stepped.executor.took[-20:]) <= 0.04


@pytest.mark.parametrize("count", [1, 8])
def test_prompts_that_are_late_extend_a_step_once_however_many_they_are(count):
    """Each of them got a token of 60 ms in every step."""
    stepped = SteppedEngine(num_pages=6000, max_model_len=64_000, interactive=LaneGoals(ttft_s=0.5, itl_s=0.04))
    alone = stepped.executor.seconds
    stepped.executor.seconds = lambda plan: alone(plan) + sum(1e-5 * c.num_tokens * c.start for c in plan.chunks)
    stepped.learn()
    stepped.submit("learn-context", 4000, 40)
    stepped.finish()
    for number in range(count):
        stepped.submit(f"long-{number}", 9000, 1, tenant=f"tenant-{number}")
    stepped.submit("chat", 40, 500, tenant="neighbour")
    stepped.step(50)
    for seq in stepped.state.running.values():
        if seq.id.startswith("long"):
            seq.num_computed = 6000  # as if its prompt were computed so far
    stepped.step(40)
    assert max(stepped.executor.took[-20:]) <= 2 * 0.04


def test_no_prompt_keeps_a_newcomer_waiting_for_more_than_its_first_token_may_take():
    stepped = SteppedEngine(num_pages=4000, max_model_len=2048, interactive=LaneGoals(ttft_s=0.1, itl_s=0.04))
    stepped.learn()
    stepped.clock.advance(2 * RECENT_S)
    backlog(stepped, "alone", 4, Lane.INTERACTIVE, 1500, 1)
    steps = len(stepped.executor.took)
    stepped.finish()
    assert 0.05 < max(stepped.executor.took[steps:]) <= 0.1


@pytest.mark.parametrize("lane", list(Lane))
@pytest.mark.slow
def test_weights_are_shares(lane):
    stepped = SteppedEngine(max_seqs=6)
    stepped.learn()
    backlog(stepped, "light", 100, lane, weight=1.0)
    backlog(stepped, "heavy", 100, lane, weight=3.0)
    before = seconds(stepped, lane)
    stepped.step(600)
    got = {tenant: seconds(stepped, lane)[tenant] - before.get(tenant, 0.0) for tenant in ("light", "heavy")}
    assert 2.4 < got["heavy"] / got["light"] < 3.8


@pytest.mark.slow
def test_who_comes_back_has_saved_nothing_up():
    stepped = SteppedEngine(max_seqs=4)
    stepped.learn()
    backlog(stepped, "steady", 200)
    stepped.step(400)
    backlog(stepped, "sleeper", 50)
    before = seconds(stepped)
    stepped.step(200)
    got = {tenant: seconds(stepped)[tenant] - before.get(tenant, 0.0) for tenant in ("steady", "sleeper")}
    assert got["steady"] > 0.4 * got["sleeper"]


@pytest.mark.slow
def test_the_gap_between_counters_stays_within_half_the_bound():
    stepped = SteppedEngine(max_seqs=4)
    stepped.learn()
    for number, (prompt, out) in enumerate([(16, 10), (200, 10), (16, 150)]):
        backlog(stepped, f"t{number}", 60, prompt=prompt, out=out)
    worst = 0.0
    for _ in range(1500):
        stepped.step()
        report = lane_reports(stepped.state, stepped.clock.now)[Lane.BATCH]
        worst = max(worst, report.gap / report.bound)
    assert 0 < worst <= 0.5


def test_a_preempted_tenant_does_not_pay_for_what_is_computed_again():
    stepped = SteppedEngine(
        max_seqs=2, scheduling=Scheduling(preemption="recompute", watermark=0.0), prefix_caching=False
    )
    stepped.learn()
    stepped.batch("victim", 200, 30, tenant="victim")
    stepped.run_until(lambda: len(stepped.times.get("victim", [])) > 5)
    account = stepped.ledger.accounts.get(Lane.BATCH, "victim")
    served, used = account.served, account.seconds
    for number in range(2):
        stepped.submit(f"chat{number}", 20, 10, tenant="chat")
    stepped.run_until(lambda: len(stepped.ends) > 27)
    stepped.finish()
    assert stepped.state.sequences == {} and stepped.state.counters.recomputed_tokens > 200
    assert account.served - served < 0.85 * (account.seconds - used)


def test_priorities_order_a_tenant_and_age():
    stepped = SteppedEngine(max_seqs=1, scheduling=Scheduling(priority_s=10.0))
    stepped.submit("running", 20, 200)
    stepped.step(2)
    stepped.submit("old", 20, 2, priority=1)
    stepped.clock.advance(5.0)
    stepped.submit("soon", 20, 2, priority=0)
    stepped.clock.advance(6.0)
    stepped.submit("late", 20, 2, priority=0)
    stepped.finish()
    assert sorted(("old", "soon", "late"), key=lambda name: stepped.times[name][0]) == ["soon", "old", "late"]


@pytest.mark.parametrize(("tokens", "goes_first"), [(10, "second"), (100, "first")])
@pytest.mark.slow
def test_a_resident_adapter_goes_first_within_half_of_the_goal(tokens, goes_first):
    """While 100 tokens are generated, 0.5 s are half over."""
    stepped = SteppedEngine({"here": 4, "away": 4}, max_seqs=1)
    stepped.learn()
    stepped.submit("warm", 20, tokens, adapter_hash="here")
    stepped.step(3)
    stepped.submit("first", 20, 2, adapter_hash="away")
    stepped.submit("second", 20, 2, adapter_hash="here")
    stepped.finish()
    assert min(("first", "second"), key=lambda name: stepped.times[name][0]) == goes_first


def test_who_waits_too_long_for_an_adapter_gets_it():
    """Room for one adapter only, and an endless stream of requests for the one that has it."""
    stepped = SteppedEngine(
        {"here": 30, "away": 30}, num_pages=60, max_seqs=4, scheduling=Scheduling(adapter_age_s=0.5)
    )
    stepped.learn()
    stepped.submit("warm", 20, 30, adapter_hash="here")
    stepped.step(5)
    stepped.submit("patient", 20, 4, adapter_hash="away")
    asked = stepped.clock.now
    for number in range(200):
        stepped.submit(f"stream{number}", 20, 30, adapter_hash="here")
        stepped.step(6)
        if "patient" in stepped.ends:
            break
    assert "patient" in stepped.ends
    assert stepped.times["patient"][0] - asked < 0.5 + 1.5
    stepped.finish()


def test_requests_for_other_adapters_pass_one_that_finds_no_room():
    stepped = SteppedEngine(
        {"here": 30, "away": 30}, num_pages=60, max_seqs=4, scheduling=Scheduling(adapter_age_s=100.0)
    )
    stepped.learn()
    stepped.submit("warm", 20, 200, adapter_hash="here")
    stepped.step(5)
    stepped.submit("blocked", 20, 4, adapter_hash="away")
    stepped.submit("free", 20, 4, adapter_hash="here")
    stepped.submit("base", 20, 4)
    stepped.run_until(lambda: "free" in stepped.ends and "base" in stepped.ends)
    assert "blocked" not in stepped.times
    stepped.finish()
    assert stepped.reason("blocked") == "length"


def test_siblings_share_the_prompt_instead_of_computing_it_again():
    stepped = SteppedEngine(num_pages=400)
    stepped.learn()
    prompt = range(1000, 1161)
    before = stepped.state.counters.cached_tokens
    for number in range(4):
        stepped.submit(f"n{number}", prompt, 8)
    stepped.finish()
    assert stepped.state.counters.cached_tokens - before == 3 * 160
    computed = sum(c.num_tokens for p in stepped.executor.plans for c in p.chunks if c.request_id.startswith("n"))
    assert computed == 161 + 3 * 1 + 4 * 7


def parties(stepped, lane=Lane.BATCH):
    accounts = stepped.state.ledger.accounts.of.items()
    return {party: account.seconds for (where, party), account in accounts if where is lane}


def test_classes_divide_their_tenants_share():
    stepped = SteppedEngine(max_seqs=8)
    stepped.learn()
    for name, weight in (("gold", 3.0), ("bronze", 1.0)):
        for number in range(60):
            fields = {"request_class": name, "class_weight": weight}
            stepped.submit(f"{name}-{number}", 32, 40, Lane.BATCH, tenant="acme", **fields)
    backlog(stepped, "globex", 60)
    stepped.step(100)
    before = parties(stepped)
    stepped.step(400)
    got = {party: seconds - before[party] for party, seconds in parties(stepped).items()}
    gold, bronze, other = got["acme\0gold"], got["acme\0bronze"], got["globex"]
    assert 2.2 < gold / bronze < 4.0
    assert 0.8 < (gold + bronze) / other < 1.25, "a tenant with classes has the share of one without"
    [acme] = [report for report in tenant_reports(stepped.state) if report.tenant == "acme"]
    assert acme.device_seconds == pytest.approx(
        sum(parties(stepped)[party] for party in got if party.startswith("acme"))
    )


def test_a_class_without_requests_leaves_its_part_to_the_others():
    stepped = SteppedEngine(max_seqs=8)
    accounts, weights = stepped.state.ledger.accounts, {}
    for name, weight in (("gold", 3.0), ("bronze", 1.0)):
        stepped.submit(name, 32, 4, Lane.BATCH, tenant="acme", weight=2.0, request_class=name, class_weight=weight)
    stepped.submit("plain", 32, 40, Lane.BATCH, tenant="acme", weight=2.0)
    stepped.step(1)
    for party in ("acme\0gold", "acme\0bronze", "acme"):
        weights[party] = accounts.get(Lane.BATCH, party).weight
    assert weights == pytest.approx({"acme\0gold": 1.2, "acme\0bronze": 0.4, "acme": 0.4})
    stepped.run_until(lambda: len(stepped.ends) == 2)
    assert accounts.get(Lane.BATCH, "acme").weight == pytest.approx(2.0)
    stepped.run_until(lambda: len(stepped.ends) == 3)
    assert not any(account.live for account in accounts.of.values())


def test_a_tenant_gains_nothing_by_changing_its_class_with_each_request():
    stepped = SteppedEngine(max_seqs=8)
    stepped.learn()
    backlog(stepped, "globex", 150, prompt=250, out=1)
    stepped.step(10)
    before, sent = seconds(stepped), 0
    for _ in range(150):
        while sent < 2 + sum(name.startswith("acme") for name in stepped.ends):
            stepped.submit(f"acme-{sent}", 250, 1, Lane.BATCH, tenant="acme", request_class=f"class-{sent % 9}")
            sent += 1
        stepped.step()
    got = {tenant: total - before.get(tenant, 0.0) for tenant, total in seconds(stepped).items()}
    assert got["acme"] < 1.2 * got["globex"]


def test_a_light_class_is_not_held_back_when_a_heavy_one_has_no_more_requests():
    stepped = SteppedEngine(max_seqs=8)
    stepped.learn()
    backlog(stepped, "globex", 100, prompt=100, out=20)
    backlog(stepped, "acme", 100, prompt=100, out=20, request_class="bulk")
    stepped.step(30)
    stepped.submit("gold", 100, 20, Lane.BATCH, tenant="acme", request_class="gold", class_weight=100.0)
    stepped.run_until(lambda: "gold" in stepped.ends)
    before = seconds(stepped)
    stepped.step(100)
    got = {tenant: total - before[tenant] for tenant, total in seconds(stepped).items()}
    assert 0.7 < got["acme"] / got["globex"] < 1.4


def test_the_answers_of_many_classes_make_room_for_another_tenant_like_those_of_one():
    stepped = SteppedEngine(max_seqs=4)
    stepped.learn()
    for number in range(4):
        stepped.submit(f"acme-{number}", 32, 400, tenant="acme", request_class=f"class-{number}")
    stepped.step(10)
    for number in range(3):
        stepped.submit(f"globex-{number}", 32, 40, tenant="globex")
    stepped.step(10)
    running = sorted(seq.request.tenant for seq in stepped.state.running.values())
    assert running == ["acme", "acme", "globex", "globex"]


def test_a_full_queue_loses_requests_of_the_tenant_that_has_most_whatever_their_classes():
    stepped = SteppedEngine(max_seqs=1, max_waiting=12)
    stepped.submit("runs")
    stepped.step()
    backlog(stepped, "globex", 4)
    for number in range(8):
        stepped.submit(f"acme-{number}", 32, 40, Lane.BATCH, tenant="acme", request_class=f"class-{number % 4}")
    stepped.step()
    for number in range(3):
        stepped.submit(f"urgent-{number}")
    stepped.step()
    assert [name[:4] for name in stepped.ends] == ["acme"] * 3


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_of_a_class_that_would_corrupt_the_accounts_is_refused(weight):
    stepped = SteppedEngine()
    stepped.submit("odd", request_class="gold", class_weight=weight)
    stepped.finish()
    assert "class_weight is out of range" in stepped.ends["odd"].refusal.message
