"""EngineStats say what the state says."""

import pytest

from engine.core.config import CoreConfig, Scheduling
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Cause, Lane, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.executor.fake import FakeExecutor
from engine.pb import engine_pb2 as pb
from engine.rpc.snapshot import snapshot


class Clock:
    """A clock that advances by a tenth of a second whenever it is read."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.1
        return self.now


@pytest.fixture
def engine():
    config = CoreConfig(num_pages=50, block_size=4, max_seqs=2, host_pages=8, scheduling=Scheduling(min_chunk=4))
    return Engine(EngineState.create(config), FakeExecutor(), clock=Clock())


def submit(engine, name, lane, tenant, **fields):
    params = SamplingParams(20, ignore_eos=True)
    request = Request(name, tuple(range(6)), params, None, lane, tenant=tenant, arrival=engine.clock(), **fields)
    engine.inbox.put(Submit(request))


def stats(engine, **options):
    return snapshot(engine.state, 1.5, engine.clock(), **options)


def test_every_figure_of_every_group_is_told(engine):
    for name, tenant in (("a", "acme"), ("b", "acme"), ("c", "globex")):
        submit(engine, name, Lane.INTERACTIVE, tenant)
    submit(engine, "d", Lane.BATCH, "acme")
    for _ in range(10):
        engine.step()
    told = stats(engine)
    interactive, batch = told.lanes
    assert (interactive.lane, interactive.running, interactive.waiting) == (pb.LANE_INTERACTIVE, 2, 1)
    assert (batch.lane, batch.running, batch.waiting) == (pb.LANE_BATCH, 0, 1)
    assert batch.oldest_wait_seconds == pytest.approx(engine.clock.now - 0.4)
    assert interactive.device_seconds > 0 == batch.device_seconds
    assert 0 <= interactive.slo_ttft_attainment <= 1
    tenants = {(tenant.lane, tenant.tenant): tenant for tenant in told.tenants}
    assert sum(tenant.running for tenant in tenants.values()) == 2
    assert tenants[pb.LANE_BATCH, "acme"].waiting == 1
    assert tenants[pb.LANE_INTERACTIVE, "acme"].device_seconds + tenants[
        pb.LANE_INTERACTIVE, "globex"
    ].device_seconds == pytest.approx(interactive.device_seconds)
    assert told.free_pages + told.kv_pages + told.cached_pages + told.adapter_pages == told.total_pages == 49
    assert (told.host_total_pages, told.steps, told.step_seconds) == (8, 10, 1.5)
    assert told.step_margin == engine.state.ledger.model.margin


def test_preemptions_are_told_by_their_cause(engine):
    submit(engine, "a", Lane.BATCH, "acme")
    submit(engine, "b", Lane.BATCH, "acme")
    for _ in range(3):
        engine.step()
    submit(engine, "now", Lane.INTERACTIVE, "acme")
    for _ in range(3):
        engine.step()
    told = stats(engine)
    assert told.preemptions == 1
    assert dict(told.preemptions_by_cause) == {"pages": 0, Cause.SLOT.value: 1, "adapter": 0}


def test_deadlines_that_press_are_urgent(engine):
    submit(engine, "late", Lane.BATCH, "acme", deadline=engine.clock() + 2.0)
    for _ in range(5):
        engine.step()
    told = stats(engine)
    assert told.batch_urgency == engine.state.ledger.batch.need > 0
    assert told.batch_share == engine.state.ledger.batch.share


def test_host_pages_that_may_be_overwritten_are_not_in_use(engine):
    host = engine.state.host
    for page, key in enumerate((b"evicted", b"preempted")):
        host.put(key, page)
    host.need([b"preempted"])
    assert (stats(engine).host_total_pages, stats(engine).host_used_pages) == (8, 1)


def test_the_integrity_check_is_there_when_asked_for(engine):
    engine.state.pool.refs[7] += 1
    assert list(stats(engine).violations) == []
    assert any("page 7" in problem for problem in stats(engine, check=True).violations)
