"""Lines of batches go to the engine of the base model that each names, and wait at that engine's gate alone."""

from __future__ import annotations

import pytest
from batch_cluster import BatchCluster, chat_line, until
from fakes import BASE, FakeEngine

from engine.core.types import LaneMode
from engine.pb import engine_pb2 as pb
from gateway.batches.eta import EtaEstimator
from gateway.batches.line_models import LineModels
from gateway.batches.record import Batch, Tally
from tests.gateway.batches.test_batch_dispatcher import working

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


async def test_an_unreadable_line_counts_as_one_of_the_first_model(cluster):
    member = await cluster.add_member(others={SMALL: FakeEngine()})
    models = member.gateway_app.gateway.models

    class Reader:
        async def get(self, entry):
            return [b'{"body": {"model": "small"}}', b"not JSON", b'{"body": {"model": "gone"}}'][entry.position]

    class Entry:
        def __init__(self, position: int) -> None:
            self.position = position

    found = LineModels(models, None, range(3))
    assert (found.left, found.waiting(BASE), found.waiting(SMALL)) == (3, 3, 3), "any may need it"
    await found.read(Reader(), map(Entry, range(3)))
    assert [found.of(position) for position in range(3)] == [SMALL, BASE, BASE]
    found.enter(0)
    assert (found.waiting(SMALL), found.waiting(BASE), found.left) == (0, 2, 3)
    found.leave(0)
    found.end(0)
    assert (found.waiting(SMALL), list(found.needed())) == (0, [BASE])
    assert LineModels(models, "pirate", range(3)).waiting(SMALL) == 0, "the batch names one model"


def open_batch(name: str, model: str | None, lines: int) -> Batch:
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
        model=model,
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
    member = await cluster.add_member(others={SMALL: small})
    for engine in (member.gateway_app.engine, small):
        engine.picture = pb.EngineStats(batch_share=0.5, lanes=[lane])
    first, second = open_batch("a", "pirate", 100), open_batch("b", SMALL, 100)
    models = member.gateway_app.gateway.models
    etas = [await EtaEstimator(OpenBatches(*others), models).eta(second) for others in ((second,), (first, second))]
    assert etas[0] == etas[1] == pytest.approx(200, rel=0.1)
    mixed_one = open_batch("0", None, 100)
    assert await EtaEstimator(OpenBatches(mixed_one, second), models).eta(mixed_one) is None
    assert await EtaEstimator(OpenBatches(mixed_one, second), models).eta(second) > etas[0]
