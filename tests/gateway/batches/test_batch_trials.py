"""Suspect lines and shards: what is counted against them, what clears them, and what runs between them."""

import asyncio
import time

import pytest
from batch_cluster import BatchCluster, chat_line, until
from batch_fakes import MovedStore, claimed, running
from fakes import BASE, INITECH, FakeEngine

from gateway.batches.lines import LineRunner
from gateway.batches.quarantine import Quarantine
from gateway.batches.store import BatchStore
from gateway.batches.trial import MOST_MARKS, Suspicion
from gateway.core.errors import ApiError, Fault
from gateway.core.feed import LEAST

POISON = "venom"
LINES = 12


@pytest.fixture
def cluster(tmp_path, valkey):
    cluster = BatchCluster(tmp_path, valkey)
    cluster.holders.tenants["initech"] = INITECH
    return cluster


@pytest.fixture
async def store(valkey):
    store = MovedStore(valkey, lease_seconds=15.0, timeout=30.0)
    await store.wait(0)
    return store


async def suspect_batch(cluster, num_lines=LINES, tenant="acme", models=(BASE,)):
    """A batch whose only shard was held by a process that is not heard of any more, and the lease of that process."""
    lines = [chat_line(f"{n}", f"{tenant} {n}", models[n % len(models)]) for n in range(num_lines)]
    batch = await cluster.submit(lines, tenant=tenant)
    short = BatchStore(cluster.redis, lease_seconds=0.05)
    validating = await cluster.store.claim("dead", ["validate"])
    assert validating.batch_id == batch.id
    await cluster.validate(cluster.store, validating)
    lease = await short.claim("dead", ["shard"])
    return batch, lease


async def suspicions(redis, batch):
    fields = await redis.hgetall(f"loralane:batch:{{{batch.tenant}}}:{batch.id}")
    return {name: value for name, value in fields.items() if name.startswith((b"lost:", b"mark:"))}


async def test_a_process_that_hands_back_what_it_lost_is_not_counted_as_dead(store, valkey):
    batch = await running(store, 8)
    alive = await claimed(store, "shard")
    assert await store.begin_trial(alive, 3) == Suspicion(losses=0, marks=0)
    await store.wait(16)
    heir = await claimed(store, "shard")
    assert (heir.losses, heir.marks) == (1, {3: 1})
    assert await store.begin_trial(heir, 3) == Suspicion(losses=1, marks=1)
    await store.release(alive)
    assert await store.begin_trial(heir, 3) == Suspicion(losses=0, marks=0), "asking twice marks once"
    await store.end_trial(heir, 3)
    assert await suspicions(valkey, batch) == {}
    assert await store.renew([heir]) == {heir: "yours"}, "what another lost was not taken from its heir"


async def test_a_mark_that_is_kept_outlasts_its_lease(store):
    await running(store, 8)
    lease = await claimed(store, "shard")
    for deaths in range(MOST_MARKS):
        assert await store.begin_trial(lease, 3) == Suspicion(losses=0, marks=deaths)
        await store.keep_mark(lease, 3)
    await store.release(lease)
    heir = await claimed(store, "shard")
    assert (heir.losses, heir.marks) == (0, {3: MOST_MARKS})


async def test_a_shard_that_got_through_its_trial_is_cleared(cluster, valkey):
    batch, _ = await suspect_batch(cluster)
    member = await cluster.add_member()
    engine, together = member.gateway_app.engine, []
    engine.reply = lambda request: together.append(engine.open) or "ok"
    async with member.dispatcher:
        ended = await cluster.ended(batch)
    assert (ended.status, ended.tally.completed) == ("completed", LINES)
    assert set(together) == {1}, "its lines ran one at a time"
    assert await suspicions(valkey, batch) == {}


async def test_suspects_of_a_model_that_is_away_keep_those_of_others_from_nothing(cluster):
    batch, _ = await suspect_batch(cluster, models=(BASE, "small"))
    member = await cluster.add_member(others={"small": FakeEngine()})
    member.gateway_app.engine.ready = False
    async with member.dispatcher:
        await until(lambda: member.counts["completed"] == LINES // 2)
        member.gateway_app.engine.ready = True
        ended = await cluster.ended(batch)
    assert (ended.status, ended.tally.completed) == ("completed", LINES)


async def test_a_shard_leaves_its_trial_when_its_earlier_holder_is_heard_of(cluster):
    batch, lease = await suspect_batch(cluster)
    member = await cluster.add_member()
    engine, together = member.gateway_app.engine, []
    engine.pause, engine.admit = 0.02, asyncio.Event()
    engine.reply = lambda request: together.append(engine.open) or "ok"
    async with member.dispatcher:
        await until(lambda: engine.open == 1)
        await cluster.store.release(lease)
        engine.admit.set()
        ended = await cluster.ended(batch)
    assert ended.tally.completed == LINES
    assert max(together) > 1


async def test_a_lease_that_a_living_gateway_lost_makes_nothing_suspect(cluster, valkey, monkeypatch):
    """An outage of Redis lets leases run out in Redis and by the gateway's clock, though the gateway lives."""
    member = await cluster.add_member()
    engine, store, leases = member.gateway_app.engine, member.store, member.dispatcher._leases
    engine.admit = asyncio.Event()
    batch = await cluster.submit([chat_line(f"{n}", f"{n}") for n in range(4 * LEAST)])
    claim, losses = store.claim, []

    async def claiming(*args):
        lease = await claim(*args)
        losses.extend([lease.losses] if lease else [])
        return lease

    monkeypatch.setattr(store, "claim", claiming)
    async with member.dispatcher:
        await until(lambda: engine.open == LEAST)
        monkeypatch.setattr(leases, "renew", lambda: asyncio.sleep(0))
        monkeypatch.setattr(store, "_lease_ms", 1)
        held = tuple(leases._held.values())
        await store.renew([each.lease for each in held])
        monkeypatch.setattr(store, "_lease_ms", 60_000)
        for each in held:
            each._ran_out()
        await until(lambda: len(engine.requests) == 2 * LEAST)
        engine.admit.set()
        ended = await cluster.ended(batch)
    assert ended.tally.completed == 4 * LEAST
    assert len(losses) == 1 + 2 + 1 + 1 and not any(losses), "validate, the shard twice, finalize, sweep"
    assert await suspicions(valkey, batch) == {}


async def test_lines_of_other_tenants_run_between_those_of_a_shard_on_trial(cluster):
    num_lines = 2 * LEAST + 8
    batch, _ = await suspect_batch(cluster, num_lines)
    other = await cluster.submit([chat_line(f"{n}", f"initech {n}") for n in range(LINES)], tenant="initech")
    member = await cluster.add_member()
    engine = member.gateway_app.engine
    engine.reply, engine.pause = lambda request: "ok", 0.03
    async with member.dispatcher:
        await cluster.ended(other)
        ended = await cluster.ended(batch)
    assert ended.tally.completed == num_lines
    tenants = [request.tenant for request in engine.requests]
    assert tenants.index("initech") < LEAST, "a shard on trial does not count as enough to do"
    assert "acme" in tenants[tenants.index("initech") + LINES :]


async def test_what_a_suspect_kept_out_is_let_in_before_the_next_suspect():
    quarantine, order, go_on = Quarantine(), [], asyncio.Event()

    async def suspect(name):
        async with quarantine.alone():
            order.append(name)
            await go_on.wait()
            await asyncio.sleep(0.05)

    async def other():
        await quarantine.until_free()
        for _ in range(5):  # as a line does that asks for a place in the engine
            await asyncio.sleep(0)
        order.append("other" if quarantine.enter() else "kept out")
        quarantine.leave()

    async with asyncio.TaskGroup() as group:
        group.create_task(suspect("first"))
        group.create_task(suspect("second"))
        await asyncio.sleep(0)
        group.create_task(other())
        await asyncio.sleep(0)
        go_on.set()
    assert order == ["first", "other", "second"]


RETRY_S = 2.0


@pytest.mark.parametrize("fault", [Fault.RATE_LIMIT_EXCEEDED, Fault.LANE_QUEUE_FULL])
async def test_suspect_lines_that_are_refused_wait_without_asking_again_and_let_others_run(cluster, monkeypatch, fault):
    batch, _ = await suspect_batch(cluster)
    member, run = await cluster.add_member(), LineRunner.run
    is_refusing, refusals = True, 0

    async def limited(lines, *args):
        nonlocal refusals
        if is_refusing and lines.lease.tenant == "acme":
            refusals += 1
            raise ApiError(fault, "not now", retry_after=RETRY_S)
        return await run(lines, *args)

    monkeypatch.setattr(LineRunner, "run", limited)
    async with member.dispatcher:
        await until(lambda: refusals > 0)
        began = time.monotonic()
        await cluster.ended(await cluster.submit([chat_line(f"{n}") for n in range(LINES)], tenant="initech"))
        waits = (time.monotonic() - began) // RETRY_S  # on a busy machine the others take longer than one wait
        assert refusals < LINES * (1 + waits), "not even every line has asked once"
        is_refusing = False
        ended = await cluster.ended(batch)
    assert ended.tally.completed == LINES
