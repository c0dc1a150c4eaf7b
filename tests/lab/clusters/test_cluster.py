"""Simulated clusters: every request ends once, also when a replica dies; the other systems' routers; the report."""

from dataclasses import replace

import pytest

from engine.core.config import CoreConfig
from engine.core.messages.requests import Lane, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import violations
from gateway.routing.split import SplitMode
from lab.clusters.compare import OURS, ROUTERS, Trial, run_trial
from lab.clusters.report import WINDOW_S, cluster_table, recovery_seconds
from lab.devices.device import find_device
from lab.devices.links import LINK_SHARE, LINKS, Link, Transfers
from lab.sim.cluster import Change, FirstToken
from lab.sim.handover import place_pages
from lab.sim.run import Setup, simulate
from lab.traffic.scenario import Scenario
from lab.traffic.synthetic import FlashCrowd, Sizes
from lab.traffic.workload import Backlog

DEVICE = find_device("h100-8b")
SETUP = Setup(DEVICE, CoreConfig(**DEVICE.engine))
SIZES = {"prompt": Sizes(64, 256), "output": Sizes(8, 32)}


def workload(**values):
    return Scenario(**{"rate": 40.0, "seconds": 4.0, "adapters": 30, **SIZES, **values}).workload()


def wanted_tokens(work):
    return sum(arrival.output_tokens for arrival in work.trace)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_ends_once_behind_every_router(router):
    work = workload()
    report = run_trial(Trial(router, SETUP, work, 3))
    lane = report.lanes["interactive"]
    assert (lane.requests, lane.finished, report.lost) == (len(work.trace), len(work.trace), 0)
    assert lane.generated_tokens == wanted_tokens(work)
    assert report.idlest > 0


# What is done with a dead replica's requests does not depend on the router.
@pytest.mark.parametrize(
    "router", [OURS, *(pytest.param(each, marks=pytest.mark.nightly) for each in ROUTERS if each != OURS)]
)
def test_a_replica_that_dies_loses_no_request_and_no_token(router):
    work = workload(batch_share=0.3, rate=100.0)
    changes = (Change(2.0, 0, dies=True), Change(3.0, 5, dies=False))
    report = run_trial(Trial(router, SETUP, work, 3, changes))
    assert report.moved > 0
    assert report.lost == 0
    assert sum(lane.finished for lane in report.lanes.values()) == len(work.trace)
    assert sum(lane.generated_tokens for lane in report.lanes.values()) == wanted_tokens(work)


def test_one_replica_is_as_the_simulation_of_one_engine():
    work = workload(backlog=Backlog(8, Sizes(64, 256), Sizes(8, 32)))
    alone, cluster = simulate(SETUP, work), run_trial(Trial("round-robin", SETUP, work, 1))
    assert cluster.tokens_per_s == pytest.approx(alone.tokens_per_s, rel=0.02)
    assert cluster.lanes["interactive"].ttft.p50 == pytest.approx(alone.lanes["interactive"].ttft.p50, rel=0.1)


def test_equal_seeds_give_equal_reports():
    trial = Trial(OURS, SETUP, workload(cv=4.0), 3)
    assert run_trial(trial) == run_trial(trial)


def test_our_router_reads_fewer_adapter_bytes_than_the_least_loaded_replica():
    work = workload(seconds=5.0, adapters=100)
    ours, least = (run_trial(Trial(router, SETUP, work, 4)).bytes_copied for router in (OURS, "least-loaded"))
    assert ours < least / 1.5


def test_prefixes_are_found_again_on_the_replica_that_computed_them(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        f'{{"timestamp": {1000 * turn + 50 * chat}, "input_length": {1024 + 512 * turn}, "output_length": 8, '
        f'"hash_ids": [{", ".join(str(100 * chat + block) for block in range(2 + turn))}]}}'
        for turn in range(4)
        for chat in range(11)
    ]
    trace.write_text("\n".join(sorted(lines)) + "\n")
    work = Scenario(trace).workload()
    ours, turns = (run_trial(Trial(router, SETUP, work, 4)).lanes["interactive"] for router in (OURS, "round-robin"))
    assert ours.cached_tokens > 0.5 * ours.prompt_tokens
    assert ours.cached_tokens > 1.5 * turns.cached_tokens


def test_a_flash_crowd_asks_for_one_adapter_while_it_lasts():
    trace = workload(crowd=FlashCrowd.parse("0.5@1-3"), adapters=1000, rate=200.0).trace
    asked = [arrival.adapter == 500 for arrival in trace if 1 <= arrival.time < 3]
    assert 0.4 < sum(asked) / len(asked) < 0.6
    assert not any(arrival.adapter == 500 for arrival in trace if arrival.time < 1)


@pytest.mark.parametrize("text", ["", "0.4", "0.4@9", "0.4@9-3", "2@0-1", "x@0-1", "nan@0-1"])
def test_a_flash_crowd_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="flash crowd"):
        FlashCrowd.parse(text)


def test_a_tide_takes_requests_away_at_its_lowest_point():
    trace = workload(rate=100.0, seconds=40.0, tide_s=40.0).trace
    high, low = (sum(start <= arrival.time < start + 10 for arrival in trace) for start in (5, 25))
    assert low < 0.4 * high


def test_recovery_ends_with_the_last_slow_window():
    steady = [FirstToken(0.1 * i, 0.05, Lane.INTERACTIVE) for i in range(600)]
    slow = [FirstToken(30.0 + 0.1 * i, 2.0, Lane.INTERACTIVE) for i in range(70)]
    batch = [FirstToken(50.0, 60.0, Lane.BATCH)]
    assert recovery_seconds(steady + slow + batch, 30.0) == 2 * WINDOW_S
    assert recovery_seconds(steady, 30.0) == 0.0


def test_the_table_has_a_column_for_each_router():
    reports = {router: run_trial(Trial(router, SETUP, workload(seconds=1.0), 2)) for router in (OURS, "hash")}
    table = cluster_table("title", reports)
    assert [column.header for column in table.columns] == ["", OURS, "hash"]
    assert "interactive TTFT p99" in list(table.columns[0].cells)


@pytest.mark.parametrize("prefill", [0, 1])
def test_a_split_request_loses_no_token_and_computes_its_prompt_once(prefill):
    work = workload(adapters=0, prompt=Sizes(500, 1000))
    trial = Trial(OURS, SETUP, work, 3, split=SplitMode.ALWAYS, prefill=prefill, link=LINKS["ethernet-100"])
    report = run_trial(trial)
    lane = report.lanes["interactive"]
    assert (lane.finished, report.lost, lane.generated_tokens) == (len(work.trace), 0, wanted_tokens(work))
    assert report.split == len(work.trace)
    assert report.kv_bytes == pytest.approx(131_072 * lane.prompt_tokens / lane.finished, rel=0.01)
    assert run_trial(trial) == report


def test_a_replica_that_sends_kv_from_host_memory_pays_for_the_copy():
    work = workload(adapters=0, prompt=Sizes(500, 1000), rate=10.0)
    device = replace(DEVICE, cost=replace(DEVICE.cost, copy_bytes_per_s=5e9))

    def ttft(host_pages):
        setup = Setup(device, CoreConfig(**{**DEVICE.engine, "host_pages": host_pages}))
        trial = Trial(OURS, setup, work, 2, split=SplitMode.ALWAYS, prefill=1)
        return run_trial(trial).lanes["interactive"].ttft.mean

    copied_s = 500 * 131_072 / 5e9
    assert ttft(30_000) > ttft(0) + copied_s


def test_what_the_router_splits_is_not_slower_than_all_or_nothing():
    """Short answers to long prompts at a high load: engines that only continue answers must not look slow for prompts,
    and what was sent since the last news must count."""
    work = Scenario(rate=25.0, seconds=4.0, prompt=Sizes(3072, 5120), output=Sizes(12, 20)).workload()
    setup = Setup(DEVICE, CoreConfig(**{**DEVICE.engine, "host_pages": 0}))

    def mean(mode, link):
        trial = Trial(OURS, setup, work, 4, split=SplitMode(mode), link=LINKS[link])
        return run_trial(trial).lanes["interactive"].e2e.mean

    never = mean("never", "nvlink")
    for link in ("nvlink", "ethernet-100"):
        assert mean("auto", link) <= 1.03 * min(never, mean("always", link))


@pytest.mark.parametrize("replica", [0, 2])
def test_no_token_is_lost_if_a_replica_of_either_side_dies(replica):
    work = workload(adapters=0, prompt=Sizes(500, 1000), rate=80.0)
    changes = (Change(2.0, replica, dies=True),)
    report = run_trial(Trial(OURS, SETUP, work, 4, changes, SplitMode.ALWAYS, 2, LINKS["ethernet-10"]))
    lane = report.lanes["interactive"]
    assert (lane.finished, report.lost, lane.generated_tokens) == (len(work.trace), 0, wanted_tokens(work))
    assert report.moved > 0 or replica == 0


@pytest.mark.parametrize("sizes", [{"num_pages": 64, "host_pages": 8}, {"num_pages": 9}], ids=["host", "device"])
def test_pages_that_arrive_take_the_room_that_there_is(sizes):
    state = EngineState.create(CoreConfig(**sizes))
    request = Request("r", tuple(range(100)), SamplingParams(max_tokens=4), produced=(7,))
    place_pages(state, request, 1.0)
    held = state.host.page_of if state.host.num_pages else state.prefix.page_of
    assert len(held) == 6
    place_pages(state, request._replace(prompt_ids=tuple(range(1000, 1100))), 2.0)
    assert len(held) == 8
    assert violations(state) == []


def test_copies_share_the_links_of_their_replicas():
    transfers = Transfers(Link("slow", 1000 / LINK_SHARE, 0.5))
    assert transfers.send(0, 1, 1000, ready=1.0) == 2.5
    assert transfers.send(0, 2, 1000, ready=1.0) == 3.5, "the sender is busy"
    assert transfers.send(3, 2, 1000, ready=0.0) == 4.5, "the receiver is busy"
    assert transfers.send(1, 0, 1000, ready=0.0) == 1.5, "links carry both directions"
