"""Lines of batches go to the engine of the base model that each names, and wait at that engine's gate alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from batch_cluster import BatchCluster, chat_line, until
from fakes import ACME, BASE, FakeEngine

from engine.core.messages.requests import LaneMode
from engine.pb import engine_pb2 as pb
from gateway.batches import dispatcher, shard, tenant_turns
from gateway.batches.eta import EtaEstimator
from gateway.batches.lease import Lease
from gateway.batches.line_models import LineModels
from gateway.batches.record import Batch, Tally
from gateway.batches.setup import BatchMetrics
from gateway.config.upstreams import UpstreamConfig
from gateway.core.feed import LEAST
from gateway.requests.route_runner import RouteTable
from gateway.upstreams.client import UpstreamClient
from gateway.virtual_models.acceptance import Acceptance
from gateway.virtual_models.by_lane import ByLane
from gateway.virtual_models.cascade import Cascade
from gateway.virtual_models.fallback import Fallback
from gateway.virtual_models.policy import MemberState
from gateway.virtual_models.split import Split
from tests.gateway.batches.test_batch_dispatcher import calls_of, working

SMALL = "small"
LEASE_SECONDS = 5.0


@pytest.fixture
async def cluster(tmp_path, valkey) -> BatchCluster:
    return BatchCluster(tmp_path, valkey, LEASE_SECONDS)


def mixed(count: int):
    """Lines of both models, also of an adapter, and a long one that is read again when it runs."""
    names = ("pirate", SMALL, BASE)
    lines = [chat_line(f"{number}", f"{number}", names[number % 3]) for number in range(count)]
    return [*lines, chat_line("long", "x" * 20, SMALL, metadata={"note": "y" * 20_000})]


async def test_each_line_is_answered_by_the_engine_of_its_model(cluster):
    small = FakeEngine()
    small.reply = lambda request: "small"
    member = await cluster.add_member(others={SMALL: small})
    batch = await cluster.submit(mixed(60))
    async with working(member):
        ended = await cluster.ended(batch)
    output, errors = await cluster.results(ended)
    assert (ended.status, len(output), errors) == ("completed", 61, {})
    told = {
        line["response"]["body"]["model"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in output.values()
    }
    assert told == {"pirate": "Hello, world!", BASE: "Hello, world!", SMALL: "small"}
    assert (len(member.gateway_app.engine.requests), len(small.requests)) == (40, 21)
    await cluster.assert_clean(member)


async def test_lines_may_name_a_virtual_model(cluster):
    small = FakeEngine()
    small.reply = lambda request: "small"
    table = RouteTable({"auto": Cascade((SMALL, BASE), Acceptance(logprob=-0.4))})
    member = await cluster.add_member(others={SMALL: small}, routes=table)
    batch = await cluster.submit([chat_line(f"{number}", model="auto") for number in range(3)])
    async with working(member):
        ended = await cluster.ended(batch)
    output, errors = await cluster.results(ended)
    assert (ended.status, len(output), errors) == ("completed", 3, {})
    bodies = [line["response"]["body"] for line in output.values()]
    assert {(body["model"], body["choices"][0]["message"]["content"]) for body in bodies} == {("auto", "Hello, world!")}
    assert {(body["x_loralane"]["model"], body["x_loralane"]["reason"]) for body in bodies} == {(BASE, "logprob")}
    assert (len(member.gateway_app.engine.requests), len(small.requests)) == (3, 3)
    await cluster.assert_clean(member)


@pytest.mark.parametrize("policy", [ByLane(interactive=BASE, batch=SMALL), Fallback((BASE, SMALL))])
async def test_a_closed_gate_holds_up_no_line_that_another_member_may_answer(cluster, policy):
    small = FakeEngine()
    table = RouteTable({"auto": policy}, lambda member: MemberState(ready=member == SMALL))
    member = await cluster.add_member(others={SMALL: small}, routes=table)
    member.gateway_app.engine.modes = dict.fromkeys(member.gateway_app.engine.modes, LaneMode.PAUSED)
    batch = await cluster.submit([chat_line(f"{number}", model=("auto", SMALL)[number % 2]) for number in range(6)])
    async with working(member):
        ended = await cluster.ended(batch)
    assert (ended.status, ended.tally.completed) == ("completed", 6)
    assert dict(ended.model_lines) == {"auto": 3, SMALL: 3}
    assert (len(member.gateway_app.engine.requests), len(small.requests)) == (0, 6)
    await cluster.assert_clean(member)


@pytest.mark.parametrize("useless", ["ghost", "cloud"])
async def test_a_member_that_cannot_answer_opens_no_way_past_a_closed_gate(cluster, useless, monkeypatch):
    """It is an adapter that is not loaded, or an upstream to which the tenant's data may not leave."""
    monkeypatch.setattr(dispatcher, "IDLE_SECONDS", 0.01)
    cluster.holders.tenants["acme"] = replace(ACME, adapters=("auto",))
    cloud = UpstreamClient("cloud", UpstreamConfig("https://cloud.example", "big"))
    table = RouteTable({"auto": Fallback((useless, BASE))}, upstreams={"cloud": cloud})
    member = await cluster.add_member(routes=table)
    set_paused(member.gateway_app.engine, True)
    batch = await cluster.submit([chat_line(f"{number}", model="auto") for number in range(3)])
    turns = calls_of(monkeypatch, member.dispatcher, "_claim_some")
    async with working(member):
        await until(lambda: len(turns) > 20)
        assert not member.gateway_app.engine.requests
        set_paused(member.gateway_app.engine, False)
        ended = await cluster.ended(batch)
    assert (ended.status, ended.tally.completed) == ("completed", 3)
    await cloud.close()
    await cluster.assert_clean(member)


async def test_metrics_tell_the_waiting_and_the_running_lines_of_each_model(cluster):
    engines = {SMALL: FakeEngine()}
    member = await cluster.add_member(others=engines)
    engines[BASE], go_on = member.gateway_app.engine, asyncio.Event()
    for engine in engines.values():
        engine.admit = go_on
    metrics, counts = BatchMetrics(member.dispatcher, member.context.gates), {BASE: 40, SMALL: 30}

    def told(name: str) -> dict[str, float]:
        [family] = [family for family in metrics.collect() if family.name == f"loralane_batch_{name}"]
        return {sample.labels["model_name"]: sample.value for sample in family.samples}

    batches = [
        await cluster.submit([chat_line(f"{number}", model=model) for number in range(count)])
        for model, count in counts.items()
    ]
    async with working(member):
        await until(lambda: all(told("lines_running").values()) and all(told("backlog").values()))
        await until(lambda: told("lines_running") == {model: engines[model].open for model in (BASE, SMALL)})
        assert {model: lines + told("lines_running")[model] for model, lines in told("backlog").items()} == counts
        go_on.set()
        for batch in batches:
            await cluster.ended(batch)
        assert told("backlog") == told("lines_running") == {BASE: 0, SMALL: 0}


async def test_a_model_whose_batch_lane_is_paused_holds_up_no_other_model(cluster):
    """The first jobs are due first, and there are more of them than the gateway holds of such as cannot go on."""
    small = FakeEngine()
    member = await cluster.add_member(others={SMALL: small})
    member.gateway_app.engine.modes = dict.fromkeys(member.gateway_app.engine.modes, LaneMode.PAUSED)
    stuck = [await cluster.submit([chat_line("1")], window="1h") for _ in range(12)]
    free = await cluster.submit([chat_line(f"{number}", model=SMALL) for number in range(20)], window="24h")
    async with working(member):
        assert (await cluster.ended(free)).tally.completed == 20
        assert not member.gateway_app.engine.requests
        member.gateway_app.engine.modes = dict.fromkeys(member.gateway_app.engine.modes, LaneMode.OPEN)
        await until(lambda: bool(member.gateway_app.engine.requests))
    assert len(stuck) == 12


def set_lane(engine: FakeEngine, mode: LaneMode) -> None:
    engine.modes = dict.fromkeys(engine.modes, mode)


def set_paused(engine: FakeEngine, is_stopped: bool) -> None:
    set_lane(engine, LaneMode.PAUSED if is_stopped else LaneMode.OPEN)


def set_away(engine: FakeEngine, is_stopped: bool) -> None:
    engine.ready = not is_stopped


def set_stuck(engine: FakeEngine, is_stopped: bool) -> None:
    if is_stopped:
        engine.admit = asyncio.Event()
    else:
        engine.admit.set()


@pytest.mark.parametrize("lines", [40, 140], ids=["one shard", "several shards"])
@pytest.mark.parametrize("stop", [set_paused, set_away, set_stuck])
async def test_the_lines_of_one_batch_wait_only_for_their_own_model(cluster, stop, lines):
    """The stopped model's lines come first in the batch, and run when it is back."""
    member = await cluster.add_member(others={SMALL: FakeEngine()})
    engine = member.gateway_app.engine
    stop(engine, True)
    batch = await cluster.submit(
        [chat_line(f"{model} {number}", model=model) for model in (BASE, SMALL) for number in range(lines)]
    )

    async def answered() -> bool:
        return (await cluster.store.get(batch.tenant, batch.id)).tally.completed >= lines

    async with working(member):
        await until(answered)
        assert "finished" not in engine.ends.values()
        stop(engine, False)
        ended = await cluster.ended(batch)
    output, errors = await cluster.results(ended)
    assert (ended.status, len(output), errors) == ("completed", 2 * lines, {})
    await cluster.assert_clean(member)


async def test_a_model_with_enough_lines_takes_no_places_from_another(cluster):
    """There are more batches for the busy model than the gateway has places, and they are due first."""
    member = await cluster.add_member(others={SMALL: FakeEngine()})
    set_stuck(member.gateway_app.engine, True)
    busy = [await cluster.submit([chat_line("1")], window="1h") for _ in range(70)]
    free = await cluster.submit([chat_line("1", model=SMALL)], window="24h")
    async with working(member):
        assert (await cluster.ended(free)).tally.completed == 1
        set_stuck(member.gateway_app.engine, False)
        assert {(await cluster.ended(batch)).tally.completed for batch in busy} == {1}


async def test_a_tenant_leaves_places_to_others(cluster, monkeypatch):
    """Its batches are due first, their lines are in the engine for long, and there is room for more lines."""
    monkeypatch.setattr(tenant_turns, "MAX_SHARDS", 8)
    member = await cluster.add_member()
    engine = member.gateway_app.engine
    engine.go_on = asyncio.Event()
    first = [await cluster.submit([chat_line("1")], window="1h") for _ in range(12)]
    other = await cluster.submit([chat_line("1")], tenant="globex", window="24h")
    async with working(member):
        await until(lambda: Counter(request.tenant for request in engine.requests) == {"acme": 4, "globex": 1})
        engine.go_on.set()
        assert {(await cluster.ended(batch)).tally.completed for batch in (*first, other)} == {1}


async def test_a_lane_that_is_paused_for_a_moment_costs_no_shard(cluster, monkeypatch):
    monkeypatch.setattr(dispatcher, "IDLE_SECONDS", 0.01)
    member = await cluster.add_member(others={SMALL: FakeEngine()})
    set_stuck(member.gateway_app.engine, True)
    async with working(member):
        batches = [await cluster.submit([chat_line(f"{number}") for number in range(LEAST)])]
        await until(lambda: member.gateway_app.engine.open == LEAST)
        batches += [await cluster.submit([chat_line("1")]) for _ in range(12)]
        await until(lambda: member.dispatcher.leases["shard"] == len(batches))
        set_paused(member.gateway_app.engine, True)
        turns = calls_of(monkeypatch, member.dispatcher, "_claim_some")
        await until(lambda: len(turns) > 3)
        assert member.dispatcher.leases["shard"] == len(batches)
        set_paused(member.gateway_app.engine, False)
        set_stuck(member.gateway_app.engine, False)
        assert {(await cluster.ended(batch)).tally.completed for batch in batches} == {LEAST, 1}


@pytest.mark.parametrize("others", [{}, {SMALL: FakeEngine()}], ids=["one model", "two models"])
async def test_lines_of_an_engine_that_is_away_for_long_go_to_another_gateway(cluster, monkeypatch, others):
    monkeypatch.setattr(shard, "LONG_CLOSED_SECONDS", 0.2)
    one, two = await cluster.add_member("one", others=others), await cluster.add_member("two", others=others)
    set_stuck(one.gateway_app.engine, True)
    batch = await cluster.submit([chat_line(f"{number}") for number in range(100)])
    async with working(one):
        await until(lambda: len(one.gateway_app.engine.requests) == LEAST)
        set_paused(one.gateway_app.engine, True)
        await until(lambda: member_is_draining(one))
        set_stuck(one.gateway_app.engine, False)
        async with working(two):
            ended = await cluster.ended(batch)
    output, errors = await cluster.results(ended)
    assert (ended.status, len(output), errors) == ("completed", 100, {})
    assert one.counts + two.counts == {"completed": 100}
    assert two.counts["completed"] == 100 - LEAST
    await cluster.assert_clean(one, two)


def member_is_draining(member) -> bool:
    return all(work.is_draining for work in member.dispatcher._works.values())


async def test_lines_of_a_closed_model_are_handed_back_and_not_claimed_again_with_those_that_are_answered(
    cluster, monkeypatch
):
    """One shard has lines of both models."""
    monkeypatch.setattr(shard, "LONG_CLOSED_SECONDS", 0.0)
    monkeypatch.setattr(dispatcher, "IDLE_SECONDS", 0.01)
    member = await cluster.add_member(others={SMALL: FakeEngine()})
    set_paused(member.gateway_app.engine, True)
    batch = await cluster.submit([*(chat_line(f"{number}") for number in range(10)), chat_line("small", model=SMALL)])
    async with working(member):
        await until(lambda: member.counts.total() == 1)
        await until(lambda: not member.dispatcher.leases["shard"])
        claims = calls_of(monkeypatch, member.store, "claim")
        await until(lambda: len(claims) > 5)
        assert not member.dispatcher.leases["shard"]
        assert member.counts.total() == 1
        set_paused(member.gateway_app.engine, False)
        ended = await cluster.ended(batch)
    assert (ended.status, ended.tally.completed) == ("completed", 11)


def leased(model_lines: Sequence[tuple[str, int]], total: int) -> Lease:
    batch = Batch("batch", "acme", "key", "/v1/completions", "file-1", "1h", total=total, model_lines=model_lines)
    return Lease(batch, "shard", 1, 60.0, last=total)


def test_the_models_of_lines_are_those_of_the_batchs_record():
    found = LineModels([BASE, SMALL], leased([("gone", 1), (BASE, 1), (SMALL, 2)], 4))
    assert [found.of(position) for position in range(4)] == [BASE, BASE, SMALL, SMALL]
    assert found.waiting == {BASE: 2, SMALL: 2}
    found.enter(2)
    assert found.waiting == {BASE: 2, SMALL: 1}
    found.leave(2)
    for position in (2, 3):
        found.end(position)
    assert list(found.needed) == [BASE]


def test_lines_of_a_batch_without_a_record_of_models_count_as_ones_of_the_first():
    found = LineModels([BASE, SMALL], leased([], 3))
    assert found.waiting == {BASE: 3}


def open_batch(name: str, *models: str, lines: int = 100) -> Batch:
    named = ("file-1", "1h")
    tally = Tally(completed=10, device_us=10_000_000)
    return Batch(
        name,
        "acme",
        "key",
        "/v1/completions",
        *named,
        status="in_progress",
        expires_at=3600,
        model_lines=tuple((model, (lines + 10) // len(models)) for model in models),
        total=lines + 10,
        tally=tally,
    )


class OpenBatches:
    def __init__(self, *batches: Batch) -> None:
        self.batches = batches

    async def open(self, most: int):
        return 0.0, self.batches


async def test_the_end_of_a_batch_depends_on_the_batches_of_the_same_engine(cluster):
    small, lane = FakeEngine(), pb.LaneStats(lane=pb.LANE_BATCH, running=1)
    routes = {"canary": Split({SMALL: 9, f"{SMALL}:next": 1}), "auto": Split({SMALL: 1, BASE: 1})}
    member = await cluster.add_member(others={SMALL: small}, routes=RouteTable(routes))
    for engine in (member.gateway_app.engine, small):
        engine.picture = pb.EngineStats(batch_share=0.5, lanes=[lane])
    first, second = open_batch("a", BASE), open_batch("b", SMALL)
    gateway = member.gateway_app.gateway
    etas = [await EtaEstimator(OpenBatches(*others), gateway).eta(second) for others in ((second,), (first, second))]
    assert etas[0] == etas[1] == pytest.approx(200, rel=0.1)
    canary = open_batch("b", "canary")
    assert await EtaEstimator(OpenBatches(first, canary), gateway).eta(canary) == etas[0]
    for mixed_one in (open_batch("0", BASE, SMALL), open_batch("0", "auto"), open_batch("0", "?")):
        assert await EtaEstimator(OpenBatches(mixed_one, second), gateway).eta(mixed_one) is None
        assert await EtaEstimator(OpenBatches(mixed_one, second), gateway).eta(second) > etas[0]
