"""What one gateway, or two, make of batches while all goes well, and while something does not."""

import asyncio
import json
import os
import signal
from collections import Counter
from contextlib import aclosing, asynccontextmanager, contextmanager
from itertools import pairwise

import pytest
from batch_house import COMPLETION, Town, chat_line, completion_line, pieces, until
from fakes import BASE

from engine.core.types import Lane
from gateway.batches import dispatcher, shard
from gateway.batches import retry as verdict
from gateway.batches.line_reader import packed
from gateway.batches.lines import Lines
from gateway.batches.store import BatchStore
from gateway.core.errors import Fault, internal, unavailable
from gateway.core.feed import LEAST
from gateway.core.limits import Scope
from gateway.core.tenants import Lapse
from gateway.requests.admission import ServiceSettings


@pytest.fixture
async def town(tmp_path, valkey):
    town = Town(tmp_path, valkey)
    yield town
    town.folder.is_broken = False


@asynccontextmanager
async def working(*offices):
    """Their dispatchers, until this is left."""
    for office in offices:
        await office.dispatcher.__aenter__()
    try:
        yield
    finally:
        await asyncio.gather(*(office.dispatcher.__aexit__(None, None, None) for office in offices))


async def test_every_line_is_answered_once_and_counted(town):
    one, two = await town.office("one"), await town.office("two")
    models = [BASE, "pirate", "poet"]
    wanted = [chat_line(f"line {number}", f"{number}", models[number % 3]) for number in range(400)]
    batch = await town.submit(wanted)
    one.house.engine.admit = two.house.engine.admit = asyncio.Event()
    async with working(one, two):
        await until(lambda: one.house.engine.open == two.house.engine.open == LEAST)
        one.house.engine.admit.set()
        ended = await town.ended(batch)
    output, errors = await town.results(ended)
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
    assert len(one.house.engine.requests) + len(two.house.engine.requests) == 400
    assert all(request.lane is Lane.BATCH for request in one.house.engine.requests)
    await town.assert_clean(one, two)


async def test_lines_that_fail_do_not_fail_the_others(town):
    office = await town.office()
    wanted = [completion_line(f"{number}", prompt="x" * 300 if number % 10 == 3 else "x") for number in range(50)]
    batch = await town.submit(wanted, endpoint=COMPLETION)
    async with working(office):
        ended = await town.ended(batch)
    output, errors = await town.results(ended)
    assert (ended.status, len(output), len(errors)) == ("completed", 45, 5)
    assert (ended.tally.completed, ended.tally.failed) == (45, 5)
    for line in errors.values():
        assert (line["error"], line["response"]["status_code"]) == (None, 400)
        assert line["response"]["body"]["error"]["code"] == "context_length_exceeded"
    await town.assert_clean(office)


async def test_lines_run_in_the_order_of_adapters_and_prefixes(town):
    office = await town.office(lane_capacity=8)
    wanted = [chat_line(f"{number}", f"{number % 7}", ["poet", "pirate"][number % 2]) for number in range(100)]
    batch = await town.submit(wanted)
    async with working(office):
        await town.ended(batch)
    versions = [request.adapter_hash for request in office.house.engine.requests]
    assert sum(one != other for one, other in pairwise(versions)) < 8, "those on their way together may overtake"


async def first_then_stuck(town, office, answered, count=60):
    """A batch of which so many lines are answered and committed, while the engine is busy with others for good."""
    engine, stuck = office.house.engine, asyncio.Event()
    engine.reply = lambda request: "done"
    plain = engine.generate

    async def generate(request):
        waits = len(engine.requests) >= answered
        async with aclosing(plain(request)) as arrivals:
            async for events in arrivals:
                yield events
                while waits and not stuck.is_set():
                    await asyncio.sleep(0.005)

    engine.generate = generate
    batch = await town.submit([chat_line(f"{number}") for number in range(count)])
    await office.dispatcher.__aenter__()

    async def committed():
        return (await town.store.get(batch.tenant, batch.id)).tally.completed >= answered and engine.open >= LEAST

    await until(committed)
    return batch, stuck


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_what_is_answered_before_a_batch_ends_early_is_kept(town, how):
    office = await town.office()
    batch, _ = await first_then_stuck(town, office, 20)
    if how == "cancelled":
        await town.store.cancel(batch.tenant, batch.id)
    else:
        assert await town.redis.hset(f"loralane:batch:{{acme}}:{batch.id}", "expires_at", 1) == 0, "it had another"
    ended = await town.ended(batch)
    await office.dispatcher.__aexit__(None, None, None)
    output, errors = await town.results(ended)
    assert (ended.status, len(output)) == (how, ended.tally.completed)
    assert 20 <= len(output) < 60
    assert {line["error"]["code"] for line in errors.values()} == {f"batch_{how}"}
    assert {line["response"] for line in errors.values()} == {None}
    assert set(office.house.engine.ends.values()) == {"finished", "aborted"}
    await town.assert_clean(office)


async def test_lines_of_a_suspended_tenant_end_in_the_error_file(town):
    office = await town.office(lane_capacity=2 * LEAST)
    batch, stuck = await first_then_stuck(town, office, 20)
    town.holders.lapses["acme"] = Lapse.TENANT_SUSPENDED
    stuck.set()
    ended = await town.ended(batch)
    await office.dispatcher.__aexit__(None, None, None)
    output, errors = await town.results(ended)
    assert (ended.status, ended.tally.failed) == ("completed", len(errors))
    assert len(output) >= 20
    assert {line["error"]["code"] for line in errors.values()} == {"tenant_suspended"}
    await town.assert_clean(office)


async def test_a_tenant_at_its_limit_waits_without_standing_in_the_way_of_others(town, monkeypatch):
    monkeypatch.setattr(shard, "LONG_REST_SECONDS", 0.0)
    monkeypatch.setattr(shard, "REST_SECONDS", 0.3)
    office = await town.office()
    await office.house.limiter.set_limits(Scope("globex"), {"concurrent_requests": 1, "requests_per_minute": None})
    never = asyncio.Event()
    office.house.engine.admit = never
    limited = await town.submit([chat_line(f"{number}", model="pirate") for number in range(300)], tenant="globex")
    async with working(office):
        await until(lambda: len(office.house.engine.requests) == 1)
        await until(lambda: sum(record.status == 429 for record in office.house.watcher.records) > 3)
        refused_before = len(office.house.watcher.records)
        office.house.engine.admit = None
        free = await town.ended(await town.submit([chat_line(f"{number}") for number in range(200)]))
        assert free.tally.completed == 200
        globex = [request for request in office.house.engine.requests if request.tenant == "globex"]
        assert len(globex) == 1
        assert office.shop.gate.in_flight <= 1
        assert refused_before < 200, "one asks for all"
        await office.house.limiter.set_limits(Scope("globex"), {"concurrent_requests": None, "tokens_per_minute": None})
        never.set()
        ended = await town.ended(limited)
    assert (ended.status, ended.tally.completed) == ("completed", 300)
    await town.assert_clean(office)


async def test_lines_go_on_when_an_engine_that_died_is_back(town):
    office = await town.office()
    engine = office.house.engine
    batch, stuck = await first_then_stuck(town, office, 20)
    engine.fail_after, engine.ready = 2, False
    stuck.set()
    await until(lambda: not engine.open)
    engine.fail_after = None
    asked = len(engine.requests)
    await asyncio.sleep(0.6)
    assert len(engine.requests) == asked, "nothing is asked of an engine that is away"
    engine.ready = True
    ended = await town.ended(batch)
    await office.dispatcher.__aexit__(None, None, None)
    output, errors = await town.results(ended)
    assert (ended.status, len(output), errors) == ("completed", 60, {})
    assert "failed" in engine.ends.values()
    await town.assert_clean(office)


async def test_an_engine_that_was_long_away_does_not_use_up_the_tries_of_what_comes_after(town, monkeypatch):
    office, run = await town.office(), Lines.run
    failures = [internal("a bug"), *(unavailable(Fault.ENGINE_UNAVAILABLE, "away", 0.001) for _ in range(5))]

    async def failing(lines, *args):
        if failures:
            raise failures.pop()
        return await run(lines, *args)

    monkeypatch.setattr(Lines, "run", failing)
    monkeypatch.setattr(verdict, "FIRST_PAUSE_S", 0.001)
    batch = await town.submit([chat_line("the one")])
    async with working(office):
        ended = await town.ended(batch)
    assert (failures, ended.tally.completed, ended.tally.failed) == ([], 1, 0)


async def test_a_validation_that_comes_too_late_moves_no_lines(town, monkeypatch):
    """Its catalog is older, so that the same lines have other places in its index."""
    office = await town.office()
    batch = await town.submit([chat_line(f"{number}", f"{number}") for number in range(300)])
    late = await BatchStore(town.redis, lease_seconds=0.1).claim("asleep", {"validate"})
    async with working(office):
        engine = office.house.engine
        engine.admit = asyncio.Event()
        await until(lambda: engine.open >= LEAST)
        lines = list(range(300, 0, -1))
        size = len(json.dumps(chat_line("0", "0"))) + 1
        await town.files.storage.write(late.batch.index_name(late.fence), pieces(packed((n, 0, size) for n in lines)))
        assert not await town.store.validated(late, 300)
        engine.admit.set()
        ended = await town.ended(batch)
    output, _ = await town.results(ended)
    assert output.keys() == {f"{number}" for number in range(300)}
    await town.assert_clean(office)


async def test_errands_are_looked_for_when_work_has_ended_not_whenever_lines_are(town, monkeypatch):
    monkeypatch.setattr(dispatcher, "BUSY_SECONDS", 0.001)
    office, asked = await town.office(), Counter()
    claim = office.store.claim

    async def counted(owner, want, skip=()):
        asked["shard" if "shard" in want else "errand"] += 1
        return await claim(owner, want, skip)

    monkeypatch.setattr(office.store, "claim", counted)
    claim_some = office.dispatcher._claim_some

    async def turn():
        asked["turn"] += 1
        return await claim_some()

    monkeypatch.setattr(office.dispatcher, "_claim_some", turn)
    engine, batch = office.house.engine, await town.submit([chat_line(f"{number}") for number in range(300)])
    engine.admit = asyncio.Event()
    async with working(office):
        await until(lambda: engine.open >= LEAST)
        asked.clear()
        await until(lambda: asked["turn"] > 50)
        assert asked["errand"] < asked["turn"] / 2
        engine.admit.set()
        ended = await town.ended(batch)
    assert (ended.status, ended.tally.completed) == ("completed", 300)


async def test_while_redis_is_away_nothing_runs_without_a_lease_and_nothing_is_lost(town, valkey_server):
    office = await town.office()
    batch, stuck = await first_then_stuck(town, office, 20)
    await office.shorten_leases(0.5)
    with silent(valkey_server):
        await until(lambda: office.house.engine.open == 0)
        await until(lambda: "shard" not in office.dispatcher.leases)
    stuck.set()
    ended = await town.ended(batch)
    await office.dispatcher.__aexit__(None, None, None)
    output, errors = await town.results(ended)
    assert (ended.status, len(output), errors) == ("completed", 60, {})
    await town.assert_clean(office)


@contextmanager
def silent(server):
    """It keeps its connections, and says nothing."""
    os.kill(server._process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server._process.pid, signal.SIGCONT)


async def test_answers_wait_for_a_storage_that_is_away(town):
    office = await town.office()
    batch, stuck = await first_then_stuck(town, office, 20)
    town.folder.is_broken = True
    await office.shorten_leases(1.0)
    stuck.set()
    await asyncio.sleep(2.0)
    before = await town.store.get(batch.tenant, batch.id)
    assert (before.status, before.tally.completed < 60) == ("in_progress", True)
    town.folder.is_broken = False
    ended = await town.ended(batch)
    await office.dispatcher.__aexit__(None, None, None)
    output, errors = await town.results(ended)
    assert (ended.status, len(output), errors) == ("completed", 60, {})
    await town.assert_clean(office)


async def test_a_gateway_that_stops_keeps_what_is_done_and_hands_back_the_rest(town, monkeypatch):
    monkeypatch.setattr(dispatcher, "STOP_SECONDS", 0.5)
    one = await town.office("one")
    batch, _ = await first_then_stuck(town, one, 20)
    await one.dispatcher.__aexit__(None, None, None)
    assert one.house.engine.open == 0
    keys = [f"loralane:{kind}:{{acme}}:{batch.id}" for kind in ("batchholders", "batchwork")]
    assert await town.redis.hlen(keys[0]) == 0
    assert {score for _, score in await town.redis.zrange(keys[1], 0, -1, withscores=True)} == {0.0}
    kept = (await town.store.get(batch.tenant, batch.id)).tally.completed
    two = await town.office("two")
    async with working(two):
        ended = await town.ended(batch)
    output, errors = await town.results(ended)
    assert (len(output), errors, two.counts["completed"]) == (60, {}, 60 - kept)
    await town.assert_clean(one, two)


async def test_lines_under_way_may_end_when_a_gateway_stops(town):
    office = await town.office()
    office.house.engine.pause = 0.02
    batch = await town.submit([chat_line(f"{number}") for number in range(200)])
    await office.dispatcher.__aenter__()
    await until(lambda: office.house.engine.open > 5)
    await office.dispatcher.__aexit__(None, None, None)
    assert set(office.house.engine.ends.values()) == {"finished"}
    stopped = await town.store.get(batch.tenant, batch.id)
    assert stopped.tally.completed == len(office.house.engine.ends) < 200


async def test_the_lane_has_room_for_others_beside_a_batch(town):
    office = await town.office(lane_capacity=8, settings=ServiceSettings(lane_capacity={Lane.BATCH: 8}))
    office.house.engine.pause = 0.001
    batch = await town.submit([chat_line(f"{number}") for number in range(150)])
    async with working(office), office.house.client() as client:
        ended = asyncio.create_task(town.ended(batch))
        while not ended.done():
            flex = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "service_tier": "flex"}
            answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=flex) for _ in range(3)))
            assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert (await ended).tally.completed == 150
    assert office.house.engine.requests
    await town.assert_clean(office)


async def test_a_full_lane_is_waited_out(town):
    office = await town.office(lane_capacity=100, settings=ServiceSettings(lane_capacity={Lane.BATCH: 25}))
    batch = await town.submit([chat_line(f"{number}") for number in range(40)])
    async with working(office):
        ended = await town.ended(batch)
    assert (ended.status, ended.tally.completed) == ("completed", 40)
    assert any(record.error_code == "lane_queue_full" for record in office.house.watcher.records)
    await town.assert_clean(office)
