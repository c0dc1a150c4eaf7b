"""Turns of decodes: a tenant with many answers at once does not make the tokens of a light one late."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.config import LaneGoals
from engine.core.fairness.accounts import RECENT_S
from engine.core.messages.requests import Lane
from engine.core.plan import limits
from engine.core.plan.limits import Limits
from engine.core.plan.next_step import plan_step
from engine.core.watch.check import leftovers, violations
from tests.core.virtual import DECODE, STEP, SteppedEngine

GOAL = 0.02
LONE = STEP + DECODE
"""Seconds of a step with one decode. A step with 32 of them takes 42 ms."""


def crowded(count=31, overlaps=False, goal=GOAL, out=400, **fields):
    """Return an engine that has learned, on which a tenant decodes `count` answers."""
    goals = LaneGoals(ttft_s=0.5, itl_s=goal)
    stepped = SteppedEngine(num_pages=4000, max_model_len=2048, interactive=goals, overlaps=overlaps)
    stepped.learn()
    stepped.clock.advance(2 * RECENT_S)
    for number in range(count):
        stepped.submit(f"heavy-{number}", 30, out, tenant="heavy", **fields)
    stepped.run_until(lambda: sum(name.startswith("heavy") for name in stepped.times) == count)
    return stepped


def tokens_of(stepped, tenant):
    return sum(len(times) for name, times in stepped.times.items() if name.startswith(tenant))


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_light_tenant_has_at_least_the_pace_of_its_share_of_the_device(overlaps):
    stepped = crowded(overlaps=overlaps)
    stepped.submit("chat", 30, 40, tenant="light")
    stepped.run_until(lambda: "chat" in stepped.ends)
    assert sorted(stepped.gaps("chat"))[-3] < 2.05 * LONE, "the step took 42 ms with all decodes"


def test_a_light_tenants_prompt_finds_room_beside_many_decodes():
    stepped, waits = crowded(), []
    for number in range(20):
        name, begun = f"chat-{number}", stepped.clock.now
        stepped.submit(name, 60, 4, tenant="light")
        stepped.run_until(lambda name=name: name in stepped.ends)
        waits.append(stepped.times[name][0] - begun)
    assert sorted(waits)[10] < 0.085, "it was 0.12"


def test_the_decodes_of_a_heavy_tenant_take_turns_and_get_their_share():
    stepped = crowded()
    stepped.submit("chat", 30, 200, tenant="light")
    stepped.run_until(lambda: len(stepped.times.get("chat", ())) > 3)
    begun, before = stepped.clock.now, {name: len(times) for name, times in stepped.times.items()}
    stepped.run_until(lambda: "chat" in stepped.ends)
    names = [f"heavy-{number}" for number in range(31)]
    got = [len(stepped.times[name]) - before[name] for name in names]
    assert sum(got) / (stepped.clock.now - begun) > 0.5 * 31 / (STEP + 31 * DECODE), "half of what it would have alone"
    assert min(got) > 0.8 * max(got)
    assert max(max(stepped.gaps(name)[before[name] :]) for name in names) < 4 * 2 * LONE, "31 rows, ten or more at once"


def test_steps_stay_short_between_two_chats_and_are_whole_again_after_a_while():
    stepped = crowded(out=1500)
    stepped.submit("chat", 30, 4, tenant="light")
    stepped.run_until(lambda: "chat" in stepped.ends)
    stepped.step(10)
    assert max(stepped.executor.took[-10:]) < 2.05 * LONE
    stepped.run_until(lambda: stepped.clock.now - stepped.times["chat"][-1] > RECENT_S)
    stepped.step(2)
    assert len(stepped.executor.plans[-1].chunks) == 31


@pytest.mark.parametrize(("weight", "most"), [(1.0, 2), (2.0, 3), (4.0, 5)])
def test_a_heavier_weight_is_a_larger_part_of_each_step(weight, most):
    stepped = crowded(weight=weight)
    stepped.submit("chat", 30, 40, tenant="light")
    stepped.run_until(lambda: len(stepped.times.get("chat", ())) > 3)
    stepped.step(20)
    longest = min(most * LONE, STEP + 32 * DECODE)
    assert longest - 2 * DECODE < max(stepped.executor.took[-10:]) < 1.05 * longest


def test_a_heavy_row_is_in_every_step_however_small_the_share():
    stepped = crowded(weight=1e-6)
    stepped.submit("chat", 30, 100, tenant="light")
    stepped.run_until(lambda: len(stepped.times.get("chat", ())) > 3)
    before = {name: len(times) for name, times in stepped.times.items()}
    stepped.step(40)
    got = [len(stepped.times[f"heavy-{number}"]) - before[f"heavy-{number}"] for number in range(31)]
    assert all(1 <= count <= 40 for count in got)


def test_heavy_parties_take_one_row_each_in_turn():
    stepped = crowded(20)
    for number in range(10):
        stepped.submit(f"other-{number}", 30, 400, tenant="other")
    stepped.step(20)
    stepped.submit("chat", 30, 100, tenant="light")
    stepped.run_until(lambda: len(stepped.times.get("chat", ())) > 3)
    before = {tenant: tokens_of(stepped, tenant) for tenant in ("heavy", "other")}
    stepped.step(60)
    got = {tenant: tokens_of(stepped, tenant) - before[tenant] for tenant in before}
    assert 0.8 < got["heavy"] / got["other"] < 1.25, "the odd place goes to who has waited longest"
    assert got["heavy"] > 100


def test_a_row_whose_caller_may_wait_long_has_its_turns():
    stepped = crowded(29, itl=3600.0)
    stepped.submit("soon", 30, 400, tenant="heavy")
    stepped.submit("chat", 30, 100, tenant="light")
    stepped.run_until(lambda: len(stepped.times.get("chat", ())) > 3)
    before = {name: len(times) for name, times in stepped.times.items()}
    stepped.step(60)
    got = [len(stepped.times[name]) - before[name] for name in before if name.startswith(("heavy", "soon"))]
    assert min(got) > 0.7 * max(got)


@pytest.mark.parametrize("rows", [(15, 15), (24, 6)])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_heavy_parties_have_turns_by_weight_whatever_their_rows(rows, weight):
    stepped = crowded(rows[0], weight=weight, out=1500)
    for number in range(rows[1]):
        stepped.submit(f"other-{number}", 30, 1500, tenant="other")
    stepped.submit("chat", 30, 1000, tenant="light", weight=40.0)
    stepped.run_until(lambda: len(stepped.times.get("chat", ())) > 50)
    before = {tenant: tokens_of(stepped, tenant) for tenant in ("heavy", "other")}
    stepped.step(400)
    got = {tenant: tokens_of(stepped, tenant) - before[tenant] for tenant in before}
    assert 0.7 * weight < got["heavy"] / got["other"] < 1.4 * weight


def test_rows_that_were_left_out_make_no_other_step_late():
    """Their tokens are late; if that counted, prompts would get the least of each step."""
    stepped = crowded()
    stepped.submit("chat", 30, 100, tenant="light")
    stepped.run_until(lambda: len(stepped.times.get("chat", ())) > 3)
    assert min(seq.due for seq in stepped.state.running.values()) < stepped.clock.now
    assert Limits(stepped.state, stepped.clock.now, timed=True).slack > 0.9 * GOAL


def test_batch_work_keeps_its_floor_beside_turns():
    stepped = crowded(25, out=1900)
    for number in range(8):
        stepped.batch(f"batch-{number}", 30, 1900)
    stepped.submit("chat", 30, 1900, tenant="light")
    stepped.step(2500)
    before, begun = stepped.ledger.busy[Lane.BATCH], stepped.clock.now
    stepped.run_until(lambda: stepped.clock.now > begun + 20)
    share = (stepped.ledger.busy[Lane.BATCH] - before) / (stepped.clock.now - begun)
    floor = stepped.state.config.scheduling.batch_floor
    assert 0.6 * floor < share < 2 * floor


def test_answers_to_a_cached_prompt_start_within_the_step():
    """A prompt's last token costs what a decode does, and `n` answers had as many of them in a step."""
    stepped = crowded(8, goal=0.03)
    stepped.submit("chat", 30, 100, tenant="light")
    stepped.run_until(lambda: len(stepped.times.get("chat", ())) > 3)
    steps = len(stepped.executor.took)
    for number in range(22):
        stepped.submit(f"heavy-n{number}", range(1000, 1033), 4, tenant="heavy")
    stepped.run_until(lambda: sum(name.startswith("heavy-n") for name in stepped.ends) == 22)
    assert max(stepped.executor.took[steps:]) < 0.036, "16 tokens of the prompt, but not 22 rows at once"


def plans_alike(stepped, monkeypatch):
    """Return whether the next plan is what it would be if decodes never took turns."""
    now = stepped.clock.now
    plan = plan_step(stepped.state, stepped.engine.policy, now)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "take_turns", lambda *_, **__: None)
        return plan == plan_step(stepped.state, stepped.engine.policy, now)


traffic = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=8)


@settings(deadline=None, max_examples=25)
@given(work=traffic, lanes=st.sampled_from([[0], [0, 1], [1]]), tenants=st.integers(1, 3), overlaps=st.booleans())
def test_plans_are_the_same_without_a_light_party(work, lanes, tenants, overlaps):
    """With one tenant, with tenants that send alike, and for batch work."""
    goals = LaneGoals(ttft_s=0.5, itl_s=0.012)
    stepped = SteppedEngine(interactive=goals, overlaps=overlaps)
    stepped.learn()
    stepped.clock.advance(2 * RECENT_S)
    if Lane.INTERACTIVE in lanes and tenants > 1:
        work = work[:1] * len(work)
    for tenant in range(tenants):
        for lane in lanes:
            for number, (prompt, out) in enumerate(work):
                stepped.submit(f"{tenant}-{lane}-{number}", prompt, out, Lane(lane), tenant=f"t{tenant}")
    patch = pytest.MonkeyPatch()
    for _ in range(100):
        stepped.step()
        if stepped.ledger.accounts.imbalance(Lane.INTERACTIVE, stepped.clock.now) is None:
            assert plans_alike(stepped, patch)


@pytest.mark.parametrize("count", [1, 5])
def test_plans_are_the_same_while_all_decodes_are_in_time(count, monkeypatch):
    stepped = crowded(count, goal=0.04)
    stepped.submit("chat", 30, 40, tenant="light")
    while "chat" not in stepped.ends:
        assert plans_alike(stepped, monkeypatch)
        stepped.step()


@settings(deadline=None, max_examples=25)
@given(
    work=st.lists(
        st.tuples(st.sampled_from("aaab"), st.integers(1, 60), st.integers(1, 40), st.integers(0, 9)), max_size=60
    ),
    pages=st.integers(30, 300),
    overlaps=st.booleans(),
    weight=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_whatever_comes_ends_once_and_no_row_waits_for_ever(work, pages, overlaps, weight):
    goals = LaneGoals(ttft_s=0.5, itl_s=0.012)
    stepped = SteppedEngine(num_pages=pages, max_seqs=16, max_model_len=128, interactive=goals, overlaps=overlaps)
    stepped.learn()
    for number, (tenant, prompt, out, pause) in enumerate(work):
        fields = {"weight": weight} if tenant == "b" else {}
        stepped.submit(f"{tenant}-{number}", prompt, out, tenant=tenant, **fields)
        stepped.step(pause)
        assert not violations(stepped.state)
    stepped.finish()
    for number, (tenant, _, out, _) in enumerate(work):
        assert len(stepped.times[f"{tenant}-{number}"]) == out
        assert stepped.reason(f"{tenant}-{number}") == "length"
    assert not leftovers(stepped.state)
