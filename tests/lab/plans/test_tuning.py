"""Token budgets that are tried on traffic, and which of them is taken."""

from dataclasses import replace

import pytest

from engine.core.config import LaneGoals
from lab.plans.advice import advise
from lab.plans.tuning import BUDGETS, goals_of, is_better, judge, trial_names, tune
from lab.sim.run import simulate
from lab.traffic.analysis import analyze
from lab.traffic.synthetic import Sizes, arrivals
from lab.traffic.workload import Workload


@pytest.fixture
def setup(make_setup):
    """An engine whose steps of a whole prompt last for a second, within wide goals."""
    return make_setup(num_pages=4000, token_budget=8192, policy="fcfs", interactive=LaneGoals(10.0, 2.0))


def test_a_smaller_budget_is_found_where_prompts_hold_up_decodes(setup):
    trace, told = arrivals(0.3, 250, Sizes(200, 1500), Sizes(10, 30)), []
    found = analyze(trace)
    advice = advise(found, setup.device, setup.core)
    tuned = tune(setup, found, trace, advice, 1, lambda name, share: told.append(name))
    goals = goals_of(advice, setup.core)
    assert tuned.setting.name == "engine.token_budget" and tuned.setting.value in BUDGETS[:3]
    assert is_better(tuned.after, tuned.before, goals)
    assert tuned.after.lanes["interactive"].itl.p99 < tuned.before.lanes["interactive"].itl.p99
    assert set(told) == set(trial_names(setup))


def test_settings_that_are_as_good_stay(make_setup):
    """No request is longer than the smallest budget."""
    setup = make_setup(token_budget=512)
    trace = arrivals(1, 100, Sizes(8, 16), Sizes(2, 4))
    found = analyze(trace)
    tuned = tune(setup, found, trace, advise(found, setup.device, setup.core), 1, lambda *_: None)
    assert tuned.setting is None and tuned.before is tuned.after


def test_late_tokens_count_before_latencies(make_setup):
    setup, strict = make_setup(), LaneGoals(0.011, 0.1, 0.9)
    trace = arrivals(1, 30, Sizes(8, 16), Sizes(2, 4))
    late = simulate(replace(setup, core=replace(setup.core, interactive=strict)), Workload(trace, trace[-1].time))
    assert judge(late, strict)[0] == pytest.approx(0.9, abs=0.01)
    assert not is_better(late, simulate(setup, Workload(trace, trace[-1].time)), strict)


def test_traffic_without_a_rate_is_refused(make_setup):
    setup = make_setup()
    trace = [arrival._replace(time=0.0) for arrival in arrivals(1, 30, Sizes(8, 16), Sizes(2, 4))]
    found = analyze(trace)
    with pytest.raises(ValueError, match="arrive over time"):
        tune(setup, found, trace, advise(found, setup.device, setup.core), 1, lambda *_: None)
