"""Usage while Redis is away: kept, delivered once when it is back, and said to be lost where it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace
from patient_valkey import PatientValkey
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from structlog.testing import capture_logs

from gateway.core.errors import ApiError, Fault
from gateway.core.tenants import Tenant
from gateway.core.usage import NOTHING, Counts, day_of, today
from gateway.limiter.base import ReserveRequest
from gateway.limiter.failover import FailoverLimiter
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter
from gateway.limiter.usage_spool import MAX_SPOOLED, UsageSpool, UsageTerms
from gateway.observe.process_metrics import UsageMetrics
from gateway.usage.books import RedisUsageBooks

pytestmark = pytest.mark.slow

USED = Counts(1, 100, 20, 30, 4000)


def asking(adapter: str = "pirate") -> ReserveRequest:
    return ReserveRequest("r", "acme", "k1", 200, adapter, "interactive", lambda: USED)


@pytest.fixture
def server(tmp_path):
    path = tmp_path / "v.sock"
    server = PatientValkey(port=0, data_dir=tmp_path, unix_socket_path=path, appendonly="yes", appendfsync="always")
    server.start()
    yield server
    if server.is_running():
        server.stop()


@pytest.fixture
async def client(server):
    patience = {"socket_connect_timeout": 60, "socket_timeout": 60}
    pool = BlockingConnectionPool.from_url(f"unix://{server.unix_socket_path}", retry=Retry(NoBackoff(), 1), **patience)
    client = Redis.from_pool(pool)
    yield client
    await client.aclose()


@pytest.fixture
async def make(client):
    async def build(policy="degraded"):
        limiter = FailoverLimiter(
            RedisLimiter(client, timeout=60.0, threshold=2, cooldown=0.0), LocalLimiter(policy=policy)
        )
        await limiter.configure([Tenant("acme")])
        return limiter

    return build


async def counted(client: Redis) -> dict[str, Counts]:
    """Return what is counted today, by adapter."""
    books = RedisUsageBooks(client)
    rows = [row async for page in books.rows("acme", today(), today()) for row in page]
    return {row.name.adapter: row.counts for row in rows}


async def delivered(limiter: FailoverLimiter) -> None:
    for _ in range(1000):
        if not limiter.undelivered_tokens:
            return
        await asyncio.sleep(0.02)
    pytest.fail("usage is left")


@pytest.mark.parametrize("policy", ["degraded", "open"])
async def test_what_was_used_without_redis_is_counted_once_when_it_is_back(server, client, make, policy):
    limiter = await make(policy)
    before = await limiter.reserve(asking("before"))
    server.terminate()
    alone = [await limiter.reserve(asking("alone")) for _ in range(3)]
    assert {(grant.source, grant.mode) for grant in alone} == {("local", "open")}
    assert len({grant.lease for grant in alone}) == 3
    await limiter.settle(before, 130)
    for grant in alone[:2]:
        await limiter.settle(grant, 130)
        await limiter.settle(grant, 130)
    failed = replace(alone[2], request=replace(alone[2].request, used=lambda: NOTHING))
    await limiter.settle(failed, 0)
    await limiter.settle(alone[2], 130)
    assert limiter.undelivered_tokens == 390, "the settlement that waits is among them"
    assert sum(sample.value for sample in samples(limiter, "loralane_usage_undelivered_tokens")) == 390
    server.start()
    await delivered(limiter)
    await limiter.close()
    assert await counted(client) == {"before": USED, "alone": USED + USED}
    assert limiter.lost_tokens == 0


async def test_reports_say_that_redis_is_away(server, client, make):
    limiter = await make()
    await limiter.settle(await limiter.reserve(asking()), 130)
    server.terminate()
    with pytest.raises(ApiError) as caught:
        await counted(client)
    assert caught.value.fault is Fault.LIMITER_UNAVAILABLE


async def refuse_writes(client: Redis, is_refusing: bool) -> None:
    """Make the server refuse all writes, with the error of a full disk, or accept them again. A folder in the place of
    its snapshot makes that fail."""
    in_the_way = Path(str((await client.config_get("dir"))["dir"]), "dump.rdb")
    await client.config_set("save", "3600 1000000")
    await asyncio.to_thread(in_the_way.mkdir if is_refusing else in_the_way.rmdir)
    await client.bgsave()
    async with asyncio.timeout(60):
        while ((await client.info("persistence"))["rdb_last_bgsave_status"] == "ok") == is_refusing:
            await asyncio.sleep(0.02)


async def test_usage_waits_while_redis_refuses_writes(client, make):
    """As on a full disk: before, during and after, the sum of what is counted is what was answered."""
    limiter = await make()
    before = [await limiter.reserve(asking("before")) for _ in range(5)]
    await refuse_writes(client, True)
    assert (await limiter.trouble()).startswith("MISCONF")
    for grant in before:
        await limiter.settle(grant, 130)
    for _ in range(5):
        await limiter.settle(await limiter.reserve(asking("alone")), 130)
    assert await counted(client) == {}
    assert limiter.undelivered_tokens == 10 * USED.tokens
    await refuse_writes(client, False)
    await delivered(limiter)
    await limiter.close()
    assert {name: counts.requests for name, counts in (await counted(client)).items()} == {"before": 5, "alone": 5}
    assert limiter.lost_tokens == 0


async def test_usage_of_a_reservation_that_redis_has_lost_is_counted_once(client, make):
    """As when it is killed before it has written its file: what it promised is gone, but not what was answered."""
    limiter = await make()
    lost, kept = await limiter.reserve(asking("lost")), await limiter.reserve(asking("kept"))
    await client.delete(*[key for key in await client.keys("*lease:*") if lost.lease.encode() in key])
    with capture_logs() as logs:
        for grant in (lost, kept, lost, kept):
            await limiter.settle(grant, 130)
        await delivered(limiter)
    assert [log["lease"] for log in logs if log["event"] == "reservation_lost"] == [lost.lease]
    await limiter.close()
    assert await counted(client) == {"lost": USED, "kept": USED}
    assert limiter.lost_tokens == 0


async def test_usage_that_a_gateway_takes_with_it_is_logged_row_by_row(server, make):
    limiter = await make()
    before = await limiter.reserve(asking())
    server.terminate()
    await limiter.settle(before, 130)
    for adapter in ("pirate", "pirate", "poet"):
        await limiter.settle(await limiter.reserve(asking(adapter)), 130)
    with capture_logs() as logs:
        await limiter.close()
    logs = [log for log in logs if log["event"] == "usage_lost"]
    assert [log["counts"] for log in logs if log.get("lease") == before.lease] == [USED.encoded()]
    assert limiter.lost_tokens == 4 * USED.tokens
    lost = {log["row"]: log["counts"] for log in logs if "row" in log}
    assert lost == {"interactive:k1:pirate": (USED + USED).encoded(), "interactive:k1:poet": USED.encoded()}
    assert {log["day"] for log in logs if "row" in log} == {today().isoformat()}


async def test_memory_for_usage_has_a_bound_that_costs_detail_and_no_tokens(client):
    spool = UsageSpool(UsageTerms(RedisLimiter(client)._calls, 400))
    for number in range(MAX_SPOOLED + 10):
        spool.add(asking(f"adapter-{number}"), 20_000, Counts(1, 2))
    rows = Counter({name.adapter: counts.prompt_tokens for _, (_, name), counts in spool.rows()})
    assert (len(rows), rows["*"], rows.total()) == (MAX_SPOOLED + 1, 20, 2 * (MAX_SPOOLED + 10))


async def test_more_than_a_batch_arrives_in_several(client):
    spool = UsageSpool(UsageTerms(RedisLimiter(client, timeout=60.0)._calls, 36_500))
    for number in range(2500):
        spool.add(asking(f"adapter-{number}"), 20_000, Counts(1, number))
    await spool.deliver()
    books = RedisUsageBooks(client)
    rows = [row async for page in books.rows("acme", day_of(20_000), day_of(20_000)) for row in page]
    assert len(rows) == 2500
    assert {row.name.adapter: row.counts.prompt_tokens for row in rows} == {f"adapter-{n}": n for n in range(2500)}


def samples(limiter: FailoverLimiter, name: str):
    return [sample for family in UsageMetrics(limiter).collect() for sample in family.samples if sample.name == name]
