"""A line of a batch is charged once, for the run whose answer counts, also if it ran twice."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections import Counter
from contextlib import AsyncExitStack
from itertools import cycle
from typing import Any

import batch_worker
import pytest
from batch_cluster import BatchCluster, chat_line, until
from batch_fakes import running
from fake_upstream import running_upstream
from fakes import ACME, BASE, FakeEngine

from gateway.batches.record import Tally
from gateway.batches.store import BatchStore
from gateway.config.upstreams import UpstreamConfig
from gateway.core.feed import LEAST
from gateway.core.tenants import Tenant
from gateway.core.usage import Counts, RowName, day_of, today
from gateway.limiter.base import ReserveRequest
from gateway.limiter.failover import FailoverLimiter
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter
from gateway.redis.connect import connect_cluster
from gateway.requests.route_runner import RouteTable
from gateway.upstreams.client import UpstreamClient
from gateway.usage.books import RedisUsageBooks
from gateway.virtual_models.acceptance import Acceptance
from gateway.virtual_models.cascade import Cascade
from gateway.virtual_models.fallback import Fallback
from tests.gateway.batches.test_batch_dispatcher import working

SMALL, CLOUD, LINES = "small", "cloud", 12
PAUSE_S = 0.5
"""Pause between the tokens of the gateway that is stopped in the middle of its lines."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.gateway.conftest", "batch_worker"])


@pytest.fixture
async def cluster(tmp_path, valkey):
    return BatchCluster(tmp_path, valkey)


def limiter_of(redis) -> FailoverLimiter:
    return FailoverLimiter(RedisLimiter(redis, timeout=60.0), LocalLimiter())


async def charged(redis, tenant: str = "acme") -> Counts:
    """Return the sum of the tenant's usage of today."""
    pages = [page async for page in RedisUsageBooks(redis).rows(tenant, today(), today())]
    return sum((row.counts for page in pages for row in page), Counts())


async def used_today(limiter: FailoverLimiter) -> float:
    """Return the tokens that count against the tenant's limit of the day."""
    [tenant, *_] = await limiter.usage("acme")
    return {limit.name: limit.used for limit in tenant.limits}["tokens_per_day"]


def told(output) -> Counts:
    """Return the usage that the lines of an output file tell, with that of members whose answers were discarded."""
    found = Counts()
    for line in output.values():
        body = line["response"]["body"]
        for one in (body["usage"], *body.get("x_loralane", {}).get("discarded", ())):
            found += Counts(1, one["prompt_tokens"], 0, one.get("completion_tokens", 0))
    return found


def embeddings_line(custom_id: str):
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": BASE, "input": custom_id},
    }


LINES_OF = {
    "chat": lambda name: chat_line(name, name),
    "cascade": lambda name: chat_line(name, name, "auto"),
    "upstream": lambda name: chat_line(name, name, "auto"),
    "embeddings": embeddings_line,
}


async def member_of(cluster, name, kind, stack):
    """Add a gateway that limits in Redis, with what lines of this kind need."""
    options = {"limiter": limiter_of(cluster.redis)}
    if kind == "cascade":
        options["others"] = {SMALL: FakeEngine()}
        options["routes"] = RouteTable({"auto": Cascade((SMALL, BASE), Acceptance(logprob=-0.4))})
    if kind == "upstream":
        upstream = await stack.enter_async_context(running_upstream())
        client = UpstreamClient(CLOUD, UpstreamConfig(upstream.url, "big"))
        stack.push_async_callback(client.close)
        options["routes"] = RouteTable({"auto": Fallback((CLOUD, BASE))}, upstreams={CLOUD: client})
    member = await cluster.add_member(name, **options)
    if kind == "upstream":
        upstream.go_on = asyncio.Event() if name == "one" else None
    return member


async def lose_leases(cluster, batch, member):
    """Make a gateway's leases run out for all others, while it works on as if it had them."""
    for held in member.dispatcher._leases._held.values():
        held.close()
    work = f"loralane:batchwork:{{acme}}:{batch.id}"
    for task in await cluster.redis.zrange(work, 0, -1):
        await cluster.redis.zadd(work, {task: 1})


async def nothing(*args):
    """Stand in for `BatchStore.claim`, so that a gateway claims no task any more."""


async def unrenewed(leases):
    """Stand in for `BatchStore.renew`, so that no renewal under way makes a lost lease valid again."""
    return dict.fromkeys(leases, "yours")


@pytest.mark.parametrize("kind", LINES_OF)
async def test_lines_that_ran_again_elsewhere_are_charged_for_the_answers_that_count(cluster, kind):
    """The first gateway has answered some lines and computes others when another takes its lease: it commits none."""
    cluster.holders.tenants["acme"] = Tenant("acme", upstreams=("*",)) if kind == "upstream" else ACME
    async with AsyncExitStack() as stack:
        one, two = [await member_of(cluster, name, kind, stack) for name in ("one", "two")]
        commit, asked, go_on = one.store.commit, asyncio.Event(), asyncio.Event()

        async def late(*args):
            asked.set()
            await go_on.wait()
            return await commit(*args)

        one.store.commit, one.store.renew = late, unrenewed
        engine, replies = one.gateway_app.engine, cycle(["", "An answer that the others do not have"])
        engine.reply, engine.go_on = lambda request: next(replies), asyncio.Event()
        names = [f"{number}" for number in range(LINES)]
        lines = [LINES_OF[kind](name) for name in names]
        batch = await cluster.submit(lines, endpoint=lines[0]["url"])
        async with working(one):
            if kind == "upstream":
                await until(lambda: len(one.gateway_app.gateway.live) == LINES)
            else:
                await asyncio.wait_for(asked.wait(), 60)
            one.store.claim = nothing  # otherwise it may claim again what it is about to lose, before the other does
            await lose_leases(cluster, batch, one)
            async with working(two):
                ended = await cluster.ended(batch)
            assert one.dispatcher.leases, "the first still works"
            go_on.set()
            for held in list(one.dispatcher._leases._held.values()) if kind == "upstream" else ():
                held.on_lease_lost()  # without an answer, there is no commit that would tell it
            await until(lambda: not one.dispatcher.leases)
        output, errors = await cluster.results(ended)
        assert (ended.status, len(output), errors) == ("completed", LINES, {})
        for member in (one, two):
            await member.gateway_app.gateway.close()
            assert await member.gateway_app.limiter.outstanding() == 0
        found, expected = await charged(cluster.redis), told(output)
        assert (found.requests, found.prompt_tokens) == (expected.requests, expected.prompt_tokens)
        assert found.completion_tokens == expected.completion_tokens
        assert await used_today(two.gateway_app.limiter) == found.tokens
        assert one.counts["wasted"] > 0 == two.counts["wasted"]


async def test_the_same_gateway_that_claims_its_lines_again_charges_them_once(cluster):
    one = await cluster.add_member(limiter=limiter_of(cluster.redis))
    one.gateway_app.engine.go_on = asyncio.Event()
    batch = await cluster.submit([chat_line(f"{number}") for number in range(LINES)])
    async with working(one):
        await until(lambda: one.gateway_app.engine.generated.total() == LINES)
        for held in list(one.dispatcher._leases._held.values()):
            held._ran_out()
        one.gateway_app.engine.go_on = None
        ended = await cluster.ended(batch)
    output, _ = await cluster.results(ended)
    await one.gateway_app.gateway.close()
    assert len(one.gateway_app.engine.requests) == 2 * LINES
    found, expected = await charged(cluster.redis), told(output)
    assert found.numbers[:2] + found.numbers[3:4] == expected.numbers[:2] + expected.numbers[3:4]
    assert one.counts["wasted"] == LINES + found.prompt_tokens, "each had its prompt and one token"


async def test_a_tenant_pays_for_lines_that_its_own_cancel_stopped(cluster):
    """They do not run again: otherwise batches that are cancelled before their ends would cost nothing."""
    one = await cluster.add_member(limiter=limiter_of(cluster.redis))
    one.gateway_app.engine.go_on = asyncio.Event()
    batch = await cluster.submit([chat_line(f"{number}") for number in range(LINES)])
    async with working(one):
        await until(lambda: one.gateway_app.engine.generated.total() == LINES)
        await cluster.store.cancel("acme", batch.id)
        ended = await cluster.ended(batch)
    output, errors = await cluster.results(ended)
    assert (ended.status, len(output), len(errors), one.counts["wasted"]) == ("cancelled", 0, LINES, 0)
    found = await charged(cluster.redis)
    assert (found.requests, found.completion_tokens, found.prompt_tokens > 0) == (LINES, LINES, True)
    await one.gateway_app.gateway.close()
    assert await used_today(one.gateway_app.limiter) == found.tokens


async def test_lines_that_were_granted_without_redis_count_against_the_day_when_they_are_committed(cluster):
    """Their usage is not spooled beside that."""
    one = await cluster.add_member(limiter=limiter_of(cluster.redis))
    limiter = one.gateway_app.limiter
    limiter._shared.reserve = limiter._local.reserve
    batch = await cluster.submit([chat_line(f"{number}") for number in range(LINES)])
    async with working(one):
        ended = await cluster.ended(batch)
    output, _ = await cluster.results(ended)
    found = await charged(cluster.redis)
    assert (found.requests, found.tokens) == (LINES, told(output).tokens)
    assert await used_today(limiter) == found.tokens
    assert limiter.undelivered_tokens == 0


async def test_a_stopped_gateway_that_goes_on_charges_nothing_again(cluster, valkey_server, tmp_path):
    """It is stopped (SIGSTOP) in the middle of its lines until another has run them."""
    options: dict[str, Any] = {
        "redis": valkey_server.connection_url,
        "folder": str(tmp_path),
        "lease_seconds": 1.0,
        "limits": True,
    }
    processes = []

    async def open_gateway(name, pause):
        told = {**options, "name": name, "poison": "venom", "pause": pause}
        process = FORKS.Process(target=batch_worker.run, args=(told,), daemon=True)
        process.start()
        processes.append(process)
        return process

    batch = await cluster.submit([chat_line(f"{number}", f"{number}") for number in range(2 * LINES)])
    limiter = limiter_of(cluster.redis)
    try:
        first = await open_gateway("first", PAUSE_S)
        await until(lambda: has_many_running(cluster.redis))
        await asyncio.sleep(PAUSE_S)  # until they have tokens
        os.kill(first.pid, signal.SIGSTOP)
        await open_gateway("second", 0.0)
        ended = await cluster.ended(batch)
        os.kill(first.pid, signal.SIGCONT)
        await until(lambda: is_settled(limiter))
    finally:
        for process in processes:
            process.kill()
            await asyncio.to_thread(process.join)
    output, errors = await cluster.results(ended)
    assert (len(output), errors) == (2 * LINES, {})
    found, expected = await charged(cluster.redis), told(output)
    assert (found.requests, found.tokens) == (expected.requests, expected.tokens)
    assert await used_today(limiter) == found.tokens


async def has_many_running(redis) -> bool:
    return len([key async for key in redis.scan_iter("loralane:lease:*")]) >= LEAST


async def is_settled(limiter) -> bool:
    return await limiter.outstanding() == 0


async def test_a_commit_charges_in_a_cluster_and_only_once(cluster_ports):
    async with connect_cluster(f"redis://127.0.0.1:{cluster_ports[0]}") as client:
        await client.flushall(target_nodes="primaries")
        store, limiter, tenant = BatchStore(client, timeout=30.0), RedisLimiter(client, timeout=30.0), "acme"
        await limiter.configure([Tenant(tenant)])
        await limiter.settle(await limiter.reserve(ReserveRequest("r", tenant, "k", 1, BASE, is_deferred=True)), 9)
        await running(store, 4)
        lease = await store.claim("me", {"shard"})
        now = (today() - day_of(0)).days
        rows = {(now, RowName("batch", "k", name)): Counts(1, 10, 0, 5) for name in ("pirate", BASE)}
        for _ in range(2):
            assert await store.commit(lease, ["part"], [0, 1], Tally(completed=2), rows)
        assert not await store.commit(type(lease)(lease.batch, "shard", 1, 0.0), ["late"], [2], Tally(1), rows)
        with pytest.raises(ValueError, match="to commit"):
            await store.commit(lease, ["other"], [1, 2], Tally(completed=2), rows)
        assert await store.commit(lease, ["only.use"], [], Tally(), {next(iter(rows)): Counts(1, 2, 0, 1)})
        found = Counter()
        for page in [page async for page in RedisUsageBooks(client).rows(tenant, today(), today())]:
            found.update({row.name.adapter: row.counts.tokens for row in page})
        assert found == {"pirate": 18, BASE: 15}
        uses = {
            usage.scope: {limit.name: limit.used for limit in usage.limits} for usage in await limiter.usage(tenant)
        }
        days = {scope.name: use["tokens_per_day"] for scope, use in uses.items()}
        assert days == {"tenant": 33, "key:k": 33, "adapter:pirate": 18, f"adapter:{BASE}": 15}
        await limiter.close()
