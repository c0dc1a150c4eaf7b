"""Whole simulations on a toy device: what policies are for, and what reports must add up to."""

import random
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from engine.core.messages.requests import Lane
from lab.sim.baselines import POLICIES, SCHEDULERS
from lab.sim.compare import BATCH_ALONE, INTERACTIVE_ALONE, plan_runs, run_all
from lab.sim.goals import judge
from lab.sim.run import simulate
from lab.traffic.synthetic import Shares, Sizes, arrivals, with_adapters, with_tenants
from lab.traffic.traces import Arrival
from lab.traffic.workload import Backlog, Workload

pytestmark = pytest.mark.slow

BACKLOG = Backlog(12, Sizes(32, 64), Sizes(16, 32))


def chat(seconds=15.0, rate=1.0, backlog=BACKLOG, **options):
    trace = arrivals(rate, seconds, Sizes(8, 24), Sizes(4, 8))
    if options:
        trace = with_adapters(trace, options["adapters"], 1.0)
    return Workload(trace, trace[-1].time, backlog, **options)


def test_the_same_seed_gives_the_same_report(make_setup):
    assert simulate(make_setup(), chat(seconds=10)) == simulate(make_setup(), chat(seconds=10))


def test_lanes_keep_interactive_requests_ahead_of_batch_work(make_setup):
    lanes, fcfs = (simulate(make_setup(policy=policy), chat()) for policy in ("lanes", "fcfs"))
    assert lanes.lanes["interactive"].ttft.p99 < fcfs.lanes["interactive"].ttft.p99 / 2
    assert lanes.lanes["batch"].tokens_per_s > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_mode_finishes_every_request(make_setup, policy, scheduler):
    workload = chat(seconds=10, backlog=None)
    report = simulate(make_setup(policy=policy, scheduler=scheduler), workload)
    lane = report.lanes["interactive"]
    assert lane.finished == lane.requests == len(workload.trace)
    assert lane.generated_tokens == sum(arrival.output_tokens for arrival in workload.trace)
    assert lane.prompt_tokens == sum(arrival.prompt_tokens for arrival in workload.trace)
    assert lane.ttft.p50 <= lane.ttft.p90 <= lane.ttft.p99 <= lane.e2e.p99
    assert 0 < report.busy <= 1


def test_predicted_lengths_order_jobs_almost_as_well_as_known_ones(make_setup):
    """Two applications, with short and with long answers, that only the lengths of their prompts tell apart."""
    rng = random.Random(1)
    kinds = [(rng.choice([(8, 4), (32, 60)])) for _ in range(240)]
    trace = [Arrival(0.05 * number, *kind) for number, kind in enumerate(kinds)]
    fcfs, unknown, known = (
        simulate(make_setup(policy=policy), Workload(trace, 12.0, limited=limited)).lanes["interactive"]
        for policy, limited in (("fcfs", False), ("sjf", False), ("sjf", True))
    )
    assert fcfs.generated_tokens == unknown.generated_tokens == sum(output for _, output in kinds)
    assert unknown.e2e.mean < min(1.2 * known.e2e.mean, 0.7 * fcfs.e2e.mean)


@pytest.mark.parametrize("backlog", [None, BACKLOG])
def test_steps_planned_ahead_answer_alike_and_less_than_a_step_later(make_setup, backlog):
    workload = chat(backlog=backlog)
    plain, ahead = (simulate(replace(make_setup(), overlaps=overlaps), workload) for overlaps in (False, True))
    one, other = (report.lanes["interactive"] for report in (plain, ahead))
    assert (other.finished, other.generated_tokens) == (one.finished, one.generated_tokens)
    assert one.ttft.p50 < other.ttft.p50 < one.ttft.p50 + 0.3 * one.itl.p50


def test_what_the_host_takes_costs_tokens_unless_steps_are_planned_ahead(make_setup):
    instant, plain, ahead = (
        simulate(replace(make_setup(), overlaps=overlaps, host_s=host_s), chat()).lanes["batch"].tokens_per_s
        for overlaps, host_s in ((False, 0.0), (False, 0.003), (True, 0.003))
    )
    assert plain < 0.95 * instant
    assert ahead == pytest.approx(instant, rel=0.02)


def test_predictions_save_steps_as_far_as_they_are_right(make_setup):
    """A decode costs 0.5 ms of a step's 10.5, so that one stream proposes as much as it may."""
    trace = [Arrival(8.0 * number, 20, 200) for number in range(12)]
    setup = make_setup()
    setup = replace(setup, core=replace(setup.core, speculation=True))
    plain, half, right = (
        simulate(setup, Workload(trace, 88.0, predicted=shares))
        for shares in (None, Shares(0.4, 0.6), Shares(1.0, 1.0))
    )
    for report in (plain, half, right):
        assert report.lanes["interactive"].generated_tokens == 12 * 200
    assert plain.proposed_tokens == 0 and plain.tokens_per_decode == 1.0
    assert right.accepted_tokens == right.proposed_tokens
    assert 1.05 < half.tokens_per_decode < 3 < 5 < right.tokens_per_decode
    assert (
        right.lanes["interactive"].tpot.p50 < half.lanes["interactive"].tpot.p50 < plain.lanes["interactive"].tpot.p50
    )


def test_one_request_takes_what_its_steps_take(make_setup, device):
    """A prompt of 20 tokens in one step and three decodes: 30 ms, then 10.5 ms each, give or take noise and context."""
    report = simulate(make_setup(), Workload([Arrival(0.0, 20, 4)], 0.0))
    lane = report.lanes["interactive"]
    assert lane.ttft.p50 == pytest.approx(0.030, rel=0.1)
    assert lane.e2e.p50 == pytest.approx(0.0615, rel=0.1)
    assert lane.tpot.p50 == pytest.approx(0.0105, rel=0.1)
    assert report.steps == 4


def test_shared_blocks_are_found_in_the_cache(make_setup):
    trace = [Arrival(float(time), 520, 2, blocks=(0, 100 + time)) for time in range(4)]
    report = simulate(make_setup(), Workload(trace, 3.0))
    assert report.lanes["interactive"].cached_tokens == 3 * 512


def test_adapters_are_loaded_and_evicted(make_setup):
    report = simulate(make_setup(num_pages=120, host_pages=0, max_model_len=256), chat(rate=3.0, adapters=40))
    assert report.adapter_loads > report.adapter_evictions > 0
    assert report.lanes["interactive"].finished > 0


def test_tenants_are_reported_apart(make_setup):
    trace = with_tenants(arrivals(15.0, 20, Sizes(20, 40), Sizes(4, 8)), 3)
    report = simulate(make_setup(max_seqs=2), Workload(trace, trace[-1].time))
    tenants = report.tenants["interactive"]
    assert sorted(tenants) == ["tenant-00", "tenant-01", "tenant-02"]
    assert sum(tenant.requests for tenant in tenants.values()) == len(trace)
    assert 0 < report.service_gap["interactive"] < report.service_bound["interactive"]


def test_requests_that_cannot_run_are_counted_as_refused(make_setup):
    trace = [Arrival(0.0, 5000, 10), Arrival(0.0, 10, 10)]
    lane = simulate(make_setup(), Workload(trace, 1.0)).lanes["interactive"]
    assert lane.refused == {"context_length_exceeded": 1}
    assert (lane.requests, lane.finished) == (2, 1)


def test_goals_compare_with_each_lane_alone(make_setup):
    setup = make_setup()
    runs = plan_runs(setup, chat(seconds=20), ["sjf"], ["continuous"], goals=True)
    assert [run.name for run in runs][:3] == ["lanes", "sjf", "fcfs"]
    reports = run_all(runs, 1, lambda *_: None)
    assert list(reports[INTERACTIVE_ALONE].lanes) == ["interactive"]
    assert list(reports[BATCH_ALONE].lanes) == ["batch"]
    judged = {item.goal.figure: item.values for item in judge(setup, reports)}
    ttft = judged["interactive p99 TTFT / alone"]
    assert list(ttft) == ["lanes", "sjf", "fcfs"]
    alone = reports[INTERACTIVE_ALONE].lanes["interactive"].ttft.p99
    assert ttft["fcfs"] == reports["fcfs"].lanes["interactive"].ttft.p99 / alone


def test_a_lanes_service_bound_is_of_what_it_ran_itself(make_setup):
    refused = Workload([Arrival(0.0, 50_000, 1), Arrival(0.0, 10, 2), Arrival(0.0, 10, 2)], 1.0, BACKLOG)
    report = simulate(make_setup(), refused)
    assert report.lanes["interactive"].refused
    assert report.service_bound["interactive"] <= 2 * 2 * (2 * 12)
    assert report.service_bound["batch"] > report.service_bound["interactive"]


def test_processes_find_the_same(make_setup):
    runs = plan_runs(make_setup(), chat(seconds=10), ["lanes"], ["continuous"], goals=False)
    assert run_all(runs, 2, lambda *_: None) == run_all(runs, 1, lambda *_: None)


def test_a_report_is_plain_data(make_setup):
    workload = chat(seconds=5)
    report = asdict(simulate(make_setup(), workload))
    assert report["lanes"]["interactive"]["requests"] == len(workload.trace)
    assert workload.only(Lane.BATCH).trace == []


def test_no_model_library_is_imported():
    code = "import sys, lab.commands.simulate; print([m for m in ('torch', 'grpc', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
