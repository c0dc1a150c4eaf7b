"""What one gateway, or two, make of batches while all goes well, and while something does not."""

import asyncio
import json
import os
import signal
from collections import Counter
from contextlib import aclosing, asynccontextmanager, contextmanager
from itertools import pairwise

import pytest
from batch_cluster import COMPLETION, BatchCluster, chat_line, completion_line, pieces, until
from fakes import BASE, FakeStream
from structlog.testing import capture_logs

from engine.core.messages.requests import Lane
from gateway.batches import dispatcher, gate, leases, parts, retry, shard
from gateway.batches.line_reader import pack_index
from gateway.batches.lines import LineRunner
from gateway.batches.store import BatchStore
from gateway.core.errors import Fault, internal, unavailable
from gateway.core.feed import LEAST
from gateway.core.limits import Scope
from gateway.core.tenants import KeyLapse
from gateway.requests.settings import ServiceSettings


@pytest.fixture
async def cluster(tmp_path, valkey):
    cluster = BatchCluster(tmp_path, valkey)
    yield cluster
    cluster.folder.is_broken = False


@asynccontextmanager
async def working(*members):
    """Their dispatchers, until this is left."""
    for member in members:
        await member.dispatcher.__aenter__()
    try:
        yield
    finally:
        await asyncio.gather(*(member.dispatcher.__aexit__(None, None, None) for member in members))


async def test_every_line_is_answered_once_and_counted(cluster):
    one, two = await cluster.add_member("one"), await cluster.add_member("two")
    models = [BASE, "pirate", "poet"]
    wanted = [chat_line(f"line {number}", f"{number}", models[number % 3]) for number in range(400)]
    batch = await cluster.submit(wanted)
    one.gateway_app.engine.admit = two.gateway_app.engine.admit = asyncio.Event()
    async with working(one, two):
        await until(lambda: one.gateway_app.engine.open == two.gateway_app.engine.open == LEAST)
        one.gateway_app.engine.admit.set()
        ended = await cluster.ended(batch)
    output, errors = await cluster.results(ended)
    assert (ended.status, len(output), errors, ended.error_file_id) == ("completed", 400, {}, None)
    assert output.keys() == {line["custom_id"] for line in wanted}
    for line in wanted:
        body = output[line["custom_id"]]["response"]["body"]
        assert (body["model"], body["choices"][0]["message"]["content"]) == (line["body"]["model"], "Hello, world!")
    assert one.counts + two.counts == {"completed": 400}
    assert min(one.counts.total(), two.counts.total()) > 0
    usages = [line["response"]["body"]["usage"] for line in output.values()]
    tally = ended.tally
    assert (tally.completed, tally.failed) == (400, 0)
    assert tally.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert tally.output_tokens == sum(usage["completion_tokens"] for usage in usages)
    assert len(one.gateway_app.engine.requests) + len(two.gateway_app.engine.requests) == 400
    assert all(request.lane is Lane.BATCH for request in one.gateway_app.engine.requests)
    await cluster.assert_clean(one, two)


async def test_lines_that_fail_do_not_fail_the_others(cluster):
    member = await cluster.add_member()
    wanted = [completion_line(f"{number}", prompt="x" * 300 if number % 10 == 3 else "x") for number in range(50)]
    batch = await cluster.submit(wanted, endpoint=COMPLETION)
    async with working(member):
        ended = await cluster.ended(batch)
    output, errors = await cluster.results(ended)
    assert (ended.status, len(output), len(errors)) == ("completed", 45, 5)
    assert (ended.tally.completed, ended.tally.failed) == (45, 5)
    for line in errors.values():
        assert (line["error"], line["response"]["status_code"]) == (None, 400)
        assert line["response"]["body"]["error"]["code"] == "context_length_exceeded"
    await cluster.assert_clean(member)


async def test_lines_run_in_the_order_of_adapters_and_prefixes(cluster):
    member = await cluster.add_member(lane_capacity=8)
    wanted = [chat_line(f"{number}", f"{number % 7}", ["poet", "pirate"][number % 2]) for number in range(100)]
    batch = await cluster.submit(wanted)
    async with working(member):
        await cluster.ended(batch)
    versions = [request.adapter_hash for request in member.gateway_app.engine.requests]
    assert sum(one != other for one, other in pairwise(versions)) < 8, "those on their way together may overtake"


def calls_of(monkeypatch, owner, name):
    """Return a list that grows by one with every call of the coroutine method `name` of `owner` that has ended."""
    method, calls = getattr(owner, name), []

    async def counted(*args):
        result = await method(*args)
        calls.append(args)
        return result

    monkeypatch.setattr(owner, name, counted)
    return calls


async def first_then_stuck(cluster, member, answered, count=60):
    """A batch of which so many lines are answered and committed, while the engine is busy with others for good."""
    engine, stuck = member.gateway_app.engine, asyncio.Event()
    engine.reply = lambda request: "done"
    plain = engine.generate

    async def waiting(request):
        waits = len(engine.requests) >= answered
        async with aclosing(plain(request)) as arrivals:
            async for events in arrivals:
                yield events
                while waits and not stuck.is_set():
                    await asyncio.sleep(0.005)

    engine.generate = lambda request, session="", handover=None: FakeStream(waiting(request), lambda: None)
    batch = await cluster.submit([chat_line(f"{number}") for number in range(count)])
    await member.dispatcher.__aenter__()

    async def committed():
        return (await cluster.store.get(batch.tenant, batch.id)).tally.completed >= answered and engine.open >= LEAST

    await until(committed)
    return batch, stuck


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_what_is_answered_before_a_batch_ends_early_is_kept(cluster, how):
    member = await cluster.add_member()
    batch, _ = await first_then_stuck(cluster, member, 20)
    if how == "cancelled":
        await cluster.store.cancel(batch.tenant, batch.id)
    else:
        assert await cluster.redis.hset(f"loralane:batch:{{acme}}:{batch.id}", "expires_at", 1) == 0, "it had another"
    ended = await cluster.ended(batch)
    await member.dispatcher.__aexit__(None, None, None)
    output, errors = await cluster.results(ended)
    assert (ended.status, len(output)) == (how, ended.tally.completed)
    assert 20 <= len(output) < 60
    assert {line["error"]["code"] for line in errors.values()} == {f"batch_{how}"}
    assert {line["response"] for line in errors.values()} == {None}
    assert set(member.gateway_app.engine.ends.values()) == {"finished", "aborted"}
    await cluster.assert_clean(member)


async def test_lines_of_a_suspended_tenant_end_in_the_error_file(cluster):
    member = await cluster.add_member(lane_capacity=2 * LEAST)
    batch, stuck = await first_then_stuck(cluster, member, 20)
    cluster.holders.lapses["acme"] = KeyLapse.TENANT_SUSPENDED
    stuck.set()
    ended = await cluster.ended(batch)
    await member.dispatcher.__aexit__(None, None, None)
    output, errors = await cluster.results(ended)
    assert (ended.status, ended.tally.failed) == ("completed", len(errors))
    assert len(output) >= 20
    assert {line["error"]["code"] for line in errors.values()} == {"tenant_suspended"}
    await cluster.assert_clean(member)


async def test_a_tenant_at_its_limit_waits_without_standing_in_the_way_of_others(cluster, monkeypatch):
    monkeypatch.setattr(shard, "LONG_REST_SECONDS", 0.0)
    monkeypatch.setattr(shard, "REST_SECONDS", 0.3)
    member = await cluster.add_member()
    await member.gateway_app.limiter.set_limits(
        Scope("globex"), {"concurrent_requests": 1, "requests_per_minute": None}
    )
    never = asyncio.Event()
    member.gateway_app.engine.admit = never
    limited = await cluster.submit([chat_line(f"{number}", model="pirate") for number in range(300)], tenant="globex")
    async with working(member):
        await until(lambda: len(member.gateway_app.engine.requests) == 1)
        await until(lambda: sum(record.outcome.status == 429 for record in member.gateway_app.watcher.records) > 3)
        refused_before = len(member.gateway_app.watcher.records)
        member.gateway_app.engine.admit = None
        free = await cluster.ended(await cluster.submit([chat_line(f"{number}") for number in range(200)]))
        assert free.tally.completed == 200
        globex = [request for request in member.gateway_app.engine.requests if request.tenant == "globex"]
        assert len(globex) == 1
        assert member.context.gates[BASE].in_flight <= 1
        assert refused_before < 200, "one asks for all"
        await member.gateway_app.limiter.set_limits(
            Scope("globex"), {"concurrent_requests": None, "tokens_per_minute": None}
        )
        never.set()
        ended = await cluster.ended(limited)
    assert (ended.status, ended.tally.completed) == ("completed", 300)
    await cluster.assert_clean(member)


async def test_lines_go_on_when_an_engine_that_died_is_back(cluster, monkeypatch):
    monkeypatch.setattr(gate, "POLL_SECONDS", 0.01)
    member = await cluster.add_member()
    engine = member.gateway_app.engine
    batch, stuck = await first_then_stuck(cluster, member, 20)
    engine.fail_after, engine.ready = 2, False
    stuck.set()
    await until(lambda: not engine.open)
    engine.fail_after = None
    asked = len(engine.requests)
    polls = calls_of(monkeypatch, member.context.gates[BASE], "poll")
    await until(lambda: len(polls) > 2)
    assert len(engine.requests) == asked, "nothing is asked of an engine that is away"
    engine.ready = True
    ended = await cluster.ended(batch)
    await member.dispatcher.__aexit__(None, None, None)
    output, errors = await cluster.results(ended)
    assert (ended.status, len(output), errors) == ("completed", 60, {})
    assert "failed" in engine.ends.values()
    await cluster.assert_clean(member)


async def test_an_engine_that_was_long_away_does_not_use_up_the_tries_of_what_comes_after(cluster, monkeypatch):
    member, run = await cluster.add_member(), LineRunner.run
    failures = [internal("a bug"), *(unavailable(Fault.ENGINE_UNAVAILABLE, "away", 0.001) for _ in range(5))]

    async def failing(lines, *args):
        if failures:
            raise failures.pop()
        return await run(lines, *args)

    monkeypatch.setattr(LineRunner, "run", failing)
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    batch = await cluster.submit([chat_line("the one")])
    async with working(member):
        ended = await cluster.ended(batch)
    assert (failures, ended.tally.completed, ended.tally.failed) == ([], 1, 0)


async def test_a_validation_that_comes_too_late_moves_no_lines(cluster, monkeypatch):
    """Its catalog is older, so that the same lines have other places in its index."""
    member = await cluster.add_member()
    batch = await cluster.submit([chat_line(f"{number}", f"{number}") for number in range(300)])
    late = await BatchStore(cluster.redis, lease_seconds=0.1).claim("asleep", {"validate"})
    async with working(member):
        engine = member.gateway_app.engine
        engine.admit = asyncio.Event()
        await until(lambda: engine.open >= LEAST)
        lines = list(range(300, 0, -1))
        size = len(json.dumps(chat_line("0", "0"))) + 1
        await cluster.files.storage.write(
            late.batch.index_name(late.fence), pieces(pack_index((n, 0, size) for n in lines))
        )
        assert not await cluster.store.validated(late, 300)
        engine.admit.set()
        ended = await cluster.ended(batch)
    output, _ = await cluster.results(ended)
    assert output.keys() == {f"{number}" for number in range(300)}
    await cluster.assert_clean(member)


async def test_errands_are_looked_for_when_work_has_ended_not_whenever_lines_are(cluster, monkeypatch):
    monkeypatch.setattr(dispatcher, "BUSY_SECONDS", 0.001)
    member, asked = await cluster.add_member(), Counter()
    claim = member.store.claim

    async def counted(owner, want, *args):
        asked["shard" if "shard" in want else "errand"] += 1
        return await claim(owner, want, *args)

    monkeypatch.setattr(member.store, "claim", counted)
    claim_some = member.dispatcher._claim_some

    async def turn():
        asked["turn"] += 1
        return await claim_some()

    monkeypatch.setattr(member.dispatcher, "_claim_some", turn)
    engine, batch = member.gateway_app.engine, await cluster.submit([chat_line(f"{number}") for number in range(300)])
    engine.admit = asyncio.Event()
    async with working(member):
        await until(lambda: engine.open >= LEAST)
        asked.clear()
        await until(lambda: asked["turn"] > 50)
        assert asked["errand"] < asked["turn"] / 2
        engine.admit.set()
        ended = await cluster.ended(batch)
    assert (ended.status, ended.tally.completed) == ("completed", 300)


async def test_work_that_ends_while_a_claim_finds_nothing_is_followed_by_another_claim(cluster, monkeypatch):
    """The claim looked for control tasks before the end of the last shard made the batch ready to be finalized."""
    monkeypatch.setattr(dispatcher, "IDLE_SECONDS", 0.01)
    member = await cluster.add_member()
    claim, engine = member.store.claim, member.gateway_app.engine

    async def outlasts_the_shard(owner, want, *args):
        lease = await claim(owner, want, *args)
        if engine.open and "shard" not in want:
            monkeypatch.setattr(dispatcher, "IDLE_SECONDS", 3600.0)
            engine.admit.set()
            await until(lambda: not member.dispatcher.leases)
        return lease

    monkeypatch.setattr(member.store, "claim", outlasts_the_shard)
    engine.admit = asyncio.Event()
    batch = await cluster.submit([chat_line(f"{number}") for number in range(3)])
    async with working(member):
        ended = await cluster.ended(batch)
    assert (ended.status, ended.tally.completed, engine.admit.is_set()) == ("completed", 3, True)
    await cluster.assert_clean(member)


async def test_while_redis_is_away_nothing_runs_without_a_lease_and_nothing_is_lost(cluster, valkey_server):
    member = await cluster.add_member()
    batch, stuck = await first_then_stuck(cluster, member, 20)
    await member.shorten_leases(0.5)
    with silent(valkey_server):
        await until(lambda: member.gateway_app.engine.open == 0)
        await until(lambda: "shard" not in member.dispatcher.leases)
    stuck.set()
    ended = await cluster.ended(batch)
    await member.dispatcher.__aexit__(None, None, None)
    output, errors = await cluster.results(ended)
    assert (ended.status, len(output), errors) == ("completed", 60, {})
    await cluster.assert_clean(member)


async def test_the_log_says_once_that_claims_wait_and_once_that_they_go_on(cluster, monkeypatch):
    monkeypatch.setattr(dispatcher, "AWAY_SECONDS", 0.001)
    member, tries = await cluster.add_member(), []
    claim = member.dispatcher._claim_some

    async def claim_some():
        tries.append(len(tries))
        if len(tries) < 10 or len(tries) == 12:
            raise unavailable(Fault.REGISTRY_UNAVAILABLE, "Redis does not answer")
        return await claim()

    member.dispatcher._claim_some = claim_some
    with capture_logs() as logged:
        async with working(member):
            await until(lambda: len(tries) > 13)
    events = [entry["event"] for entry in logged if entry["event"].startswith("batch_claims")]
    assert events == ["batch_claims_wait", "batch_claims_go_on"] * 2


@contextmanager
def silent(server):
    """It keeps its connections, and says nothing."""
    os.kill(server._process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server._process.pid, signal.SIGCONT)


async def test_answers_wait_for_a_storage_that_is_away(cluster, monkeypatch):
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(parts, "RETRY_SECONDS", 0.05)
    member = await cluster.add_member()
    batch, stuck = await first_then_stuck(cluster, member, 20)
    cluster.folder.is_broken = True
    await member.shorten_leases(1.0)
    stuck.set()
    renewals = calls_of(monkeypatch, member.dispatcher._leases, "renew")
    await until(lambda: cluster.folder.failures > 2 and len(renewals) > 2)
    before = await cluster.store.get(batch.tenant, batch.id)
    assert (before.status, before.tally.completed < 60) == ("in_progress", True)
    cluster.folder.is_broken = False
    ended = await cluster.ended(batch)
    await member.dispatcher.__aexit__(None, None, None)
    output, errors = await cluster.results(ended)
    assert (ended.status, len(output), errors) == ("completed", 60, {})
    await cluster.assert_clean(member)


async def test_a_batch_waits_for_a_disk_that_is_almost_full(cluster, monkeypatch):
    """No line is lost or run twice, no further shard begins, and what waits is told once."""
    monkeypatch.setattr(parts, "RETRY_SECONDS", 0.05)
    member = await cluster.add_member()
    batch, stuck = await first_then_stuck(cluster, member, 20)
    cluster.files.storage._disk = None  # what the test itself stores has room
    cluster.free_bytes = 2**28 - 1
    with capture_logs() as logs:
        stuck.set()
        await until(lambda: any(line["event"] == "batch_part_waits" for line in logs))
        await until(lambda: member.gateway_app.engine.open == 0)
        waiting = await cluster.submit([chat_line("later")])
        for _ in range(20):
            assert not await member.dispatcher._claim_shard()
            await asyncio.sleep(0.02)
    before = await cluster.store.get(batch.tenant, batch.id)
    assert (before.status, before.tally.completed < 60) == ("in_progress", True)
    told = [line["reason"] for line in logs if line["event"] == "batch_part_waits"]
    assert len(told) == len(set(told)) == 1
    cluster.free_bytes = 2**30
    ended, later = await cluster.ended(batch), await cluster.ended(waiting)
    await member.dispatcher.__aexit__(None, None, None)
    output, errors = await cluster.results(ended)
    assert (ended.status, len(output), errors) == ("completed", 60, {})
    assert (later.status, member.counts) == ("completed", {"completed": 61})
    await cluster.assert_clean(member)


async def test_answers_are_charged_before_they_are_a_file(cluster):
    member = await cluster.add_member()
    batch, stuck = await first_then_stuck(cluster, member, 20)
    record = (await cluster.files.list(batch.tenant)).data[0]
    parts_written = await cluster.files.storage.list(f"{batch.folder}parts/")
    size = await cluster.files.storage.total_size(parts_written)
    use = await cluster.files.use(batch.tenant)
    assert size > 0
    assert (use.bytes, use.files) == (record.bytes + size, 2)
    stuck.set()
    await cluster.ended(batch)
    await member.dispatcher.__aexit__(None, None, None)
    await cluster.assert_clean(member)


async def test_a_gateway_that_stops_keeps_what_is_done_and_hands_back_the_rest(cluster, monkeypatch):
    monkeypatch.setattr(dispatcher, "STOP_SECONDS", 0.5)
    one = await cluster.add_member("one")
    batch, _ = await first_then_stuck(cluster, one, 20)
    await one.dispatcher.__aexit__(None, None, None)
    assert one.gateway_app.engine.open == 0
    keys = [f"loralane:{kind}:{{acme}}:{batch.id}" for kind in ("batchholders", "batchwork")]
    assert await cluster.redis.hlen(keys[0]) == 0
    assert {score for _, score in await cluster.redis.zrange(keys[1], 0, -1, withscores=True)} == {0.0}
    kept = (await cluster.store.get(batch.tenant, batch.id)).tally.completed
    two = await cluster.add_member("two")
    async with working(two):
        ended = await cluster.ended(batch)
    output, errors = await cluster.results(ended)
    assert (len(output), errors, two.counts["completed"]) == (60, {}, 60 - kept)
    await cluster.assert_clean(one, two)


async def test_a_gateway_that_drains_hands_its_batches_over_and_claims_none_while_it_lives(cluster, monkeypatch):
    monkeypatch.setattr(dispatcher, "STOP_SECONDS", 0.5)
    one, two = await cluster.add_member("one"), await cluster.add_member("two")
    batch, _ = await first_then_stuck(cluster, one, 20)
    await one.dispatcher.hand_over()
    assert not one.dispatcher.leases
    kept = (await cluster.store.get(batch.tenant, batch.id)).tally.completed
    later = await cluster.submit([chat_line("later")])
    await asyncio.sleep(2 * dispatcher.IDLE_SECONDS)
    assert not one.dispatcher.leases
    async with working(two):
        ended = await cluster.ended(batch)
        await cluster.ended(later)
    output, errors = await cluster.results(ended)
    assert (len(output), errors, two.counts["completed"]) == (60, {}, 60 - kept + 1)
    await one.dispatcher.__aexit__(None, None, None)
    await cluster.assert_clean(one, two)


async def test_a_gateway_that_drains_while_redis_is_away_gives_its_leases_back_later(cluster, monkeypatch):
    monkeypatch.setattr(dispatcher, "STOP_SECONDS", 0.5)
    monkeypatch.setattr(dispatcher, "AWAY_SECONDS", 0.01)
    member = await cluster.add_member()
    batch, _ = await first_then_stuck(cluster, member, 20)
    release, is_away = member.store.release, True

    async def release_unless_away(*arguments):
        if is_away:
            raise unavailable(Fault.REGISTRY_UNAVAILABLE, "Redis does not answer")
        await release(*arguments)

    monkeypatch.setattr(member.store, "release", release_unless_away)
    await member.dispatcher.hand_over()
    holders = f"loralane:batchholders:{{acme}}:{batch.id}"
    assert await cluster.redis.hlen(holders)
    is_away = False
    async with asyncio.timeout(30):
        while await cluster.redis.hlen(holders):
            await asyncio.sleep(0.01)
    await member.dispatcher.__aexit__(None, None, None)


async def test_lines_under_way_may_end_when_a_gateway_stops(cluster):
    member = await cluster.add_member()
    member.gateway_app.engine.pause = 0.02
    batch = await cluster.submit([chat_line(f"{number}") for number in range(200)])
    await member.dispatcher.__aenter__()
    await until(lambda: member.gateway_app.engine.open > 5)
    await member.dispatcher.__aexit__(None, None, None)
    assert set(member.gateway_app.engine.ends.values()) == {"finished"}
    stopped = await cluster.store.get(batch.tenant, batch.id)
    assert stopped.tally.completed == len(member.gateway_app.engine.ends) < 200


async def test_the_lane_has_room_for_others_beside_a_batch(cluster):
    member = await cluster.add_member(lane_capacity=8, settings=ServiceSettings(lane_capacity={Lane.BATCH: 8}))
    member.gateway_app.engine.pause = 0.001
    batch = await cluster.submit([chat_line(f"{number}") for number in range(150)])
    async with working(member), member.gateway_app.client() as client:
        ended = asyncio.create_task(cluster.ended(batch))
        while not ended.done():
            flex = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "service_tier": "flex"}
            answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=flex) for _ in range(3)))
            assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert (await ended).tally.completed == 150
    assert member.gateway_app.engine.requests
    await cluster.assert_clean(member)


async def test_a_full_lane_is_waited_out(cluster):
    member = await cluster.add_member(lane_capacity=100, settings=ServiceSettings(lane_capacity={Lane.BATCH: 25}))
    batch = await cluster.submit([chat_line(f"{number}") for number in range(40)])
    async with working(member):
        ended = await cluster.ended(batch)
    assert (ended.status, ended.tally.completed) == ("completed", 40)
    assert any(record.outcome.error_code == "lane_queue_full" for record in member.gateway_app.watcher.records)
    await cluster.assert_clean(member)
