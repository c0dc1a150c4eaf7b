"""Redis away: what each policy does, and that everything is right again when it is back."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from msgspec.structs import replace
from patient_valkey import PatientValkey
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from structlog.testing import capture_logs

from gateway.core.breaker import Breaker
from gateway.core.errors import ApiError, Fault
from gateway.core.limits import Limits, Scope
from gateway.core.tenants import Tenant
from gateway.core.usage import Counts
from gateway.limiter.base import Grant, ReserveRequest
from gateway.limiter.failover import FailoverLimiter
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter
from gateway.redis.client import StoreError

pytestmark = pytest.mark.slow

ACME = Tenant("acme", limits=Limits(tokens_per_minute=1000))
FAILURES = 2


def asking(tokens: int) -> ReserveRequest:
    return ReserveRequest("r", "acme", "k1", tokens, "pirate")


async def attempt(limiter, request: ReserveRequest) -> Grant | ApiError:
    try:
        return await limiter.reserve(request)
    except ApiError as error:
        return error


@pytest.fixture
def server(tmp_path):
    """A Valkey of this test's own, on a socket that stays the same when it is started again."""
    path = tmp_path / "v.sock"
    server = PatientValkey(port=0, data_dir=tmp_path, unix_socket_path=path, appendonly="yes", appendfsync="always")
    server.start()
    yield server
    if server.is_running():
        server.stop()


@pytest.fixture
async def make(server):
    patience = {"socket_connect_timeout": 60, "socket_timeout": 60}
    pool = BlockingConnectionPool.from_url(f"unix://{server.unix_socket_path}", retry=Retry(NoBackoff(), 1), **patience)
    client = Redis.from_pool(pool)

    async def build(policy="degraded", patience=60.0, replicas=1, lease_seconds=30.0):
        shared = RedisLimiter(client, timeout=patience, threshold=FAILURES, cooldown=0.0, lease_seconds=lease_seconds)
        limiter = FailoverLimiter(shared, LocalLimiter(replicas, policy=policy))
        await limiter.configure([ACME])
        return limiter

    yield build
    await client.aclose()


async def settled(limiter) -> None:
    """Nothing stays outstanding; what is owed is sent in the background."""
    for _ in range(1000):
        if await limiter.outstanding() == 0:
            return
        await asyncio.sleep(0.02)
    pytest.fail("leases are left")


async def test_killed_then_degraded_then_recovered(server, make):
    limiter = await make()
    before = await limiter.reserve(asking(400))
    assert (limiter.mode, before.source) == ("redis", "redis")

    server.terminate()
    alone = await limiter.reserve(asking(500))
    assert alone.source == "local"
    with pytest.raises(ApiError) as caught:
        await limiter.reserve(asking(700))
    assert caught.value.fault is Fault.RATE_LIMIT_EXCEEDED
    assert limiter.mode == "degraded"
    assert await limiter.trouble() == "it gives no answer"
    await limiter.settle(before, 250)

    server.start()
    assert await limiter.trouble() == ""
    assert limiter.mode == "redis"
    await limiter.settle(alone, 1)
    await settled(limiter)
    assert (await limiter.reserve(asking(0))).source == "redis"
    async with Redis(unix_socket_path=str(server.unix_socket_path)) as books:
        assert float(await books.hget("loralane:bucket:{acme}:tenant", "today")) == 250


async def test_recovery_needs_no_ping(server, make):
    limiter = await make()
    server.terminate()
    for _ in range(FAILURES):
        await limiter.reserve(asking(1))
    assert limiter.mode == "degraded"
    server.start()
    assert (await limiter.reserve(asking(1))).source == "redis"
    assert limiter.mode == "redis"


async def test_a_silent_server_is_not_waited_for(server, make):
    limiter = await make(patience=0.2)
    process = (await limiter._shared._calls._client.info("server"))["process_id"]
    os.kill(process, signal.SIGSTOP)
    try:
        for _ in range(FAILURES):
            grant = await limiter.reserve(asking(10))
            await limiter.settle(grant, 0)
            assert grant.source == "local"
        assert limiter.mode == "degraded"
    finally:
        os.kill(process, signal.SIGCONT)
    for _ in range(1000):
        grant = await limiter.reserve(asking(0))
        await limiter.settle(grant, 0)
        if grant.source == "redis":
            break
        await asyncio.sleep(0.02)
    assert limiter.mode == "redis"
    await settled(limiter)


async def test_closed_refuses_with_503(server, make):
    limiter = await make("closed")
    server.terminate()
    for _ in range(FAILURES):
        with pytest.raises(ApiError) as caught:
            await limiter.reserve(asking(1))
        assert caught.value.fault is Fault.LIMITER_UNAVAILABLE
        assert caught.value.retry_after == 1.0
    assert limiter.mode == "closed"


async def test_open_admits_without_limits(server, make):
    limiter = await make("open")
    server.terminate()
    for _ in range(FAILURES):
        grant = await limiter.reserve(asking(10**9))
        await limiter.settle(grant, 5)
        await limiter.settle(grant, 0)
    assert (limiter.mode, grant.headers()) == ("open", {"x-loralane-limiter": "open"})


async def test_alone_a_gateway_grants_its_share_of_the_limits_last_seen(server, make):
    limiter = await make(replicas=4)
    await limiter._shared.set_limits(Scope("acme"), {"tokens_per_minute": 400})
    await limiter.reserve(asking(1))
    server.terminate()
    grant = await limiter.reserve(asking(99))
    assert grant.tokens.limit == 100
    assert await limiter.limits(Scope("acme")) == Limits(tokens_per_minute=400)


async def test_a_share_that_is_used_up_is_our_fault_and_a_whole_limit_is_not(server, make):
    limiter = await make(replicas=4)
    server.terminate()
    await limiter.reserve(asking(200))
    with pytest.raises(ApiError) as ours:
        await limiter.reserve(asking(100))
    assert (ours.value.fault, ours.value.headers()["x-loralane-limiter"]) == (Fault.LIMITER_UNAVAILABLE, "degraded")
    assert 0 < ours.value.retry_after <= 12.0
    with pytest.raises(ApiError) as never:
        await limiter.reserve(asking(300))
    assert never.value.fault is Fault.LIMITER_UNAVAILABLE
    with pytest.raises(ApiError) as theirs:
        await limiter.reserve(asking(1001))
    assert theirs.value.fault is Fault.INSUFFICIENT_QUOTA


@pytest.mark.parametrize(
    ("said", "mode"),
    [
        ({"tokens_per_minute": "closed"}, "closed"),
        ({"tokens_per_minute": "open"}, "open"),
        ({"requests_per_minute": "closed"}, "degraded"),
        ({}, "degraded"),
    ],
)
async def test_what_an_operator_said_of_a_limit_is_known_from_the_last_grant(server, make, said, mode):
    limiter = await make()
    await limiter._shared.set_limits(Scope("acme"), {"when_redis_is_away": said})
    await limiter.reserve(asking(1))
    assert (await limiter.limits(Scope("acme"))).when_redis_is_away == said
    assert limiter.modes == {"redis"}
    server.terminate()
    for _ in range(FAILURES):
        answer = await attempt(limiter, asking(1))
        assert answer.headers()["x-loralane-limiter"] == mode
        assert isinstance(answer, ApiError) is (mode == "closed")
    assert limiter.modes == {mode}
    assert limiter.mode == "degraded"


async def test_of_several_limits_the_strictest_policy_counts_and_shadows_have_none(server, make):
    limiter = await make("open")
    own = {"requests_per_minute": 9, "when_redis_is_away": {"requests_per_minute": "degraded"}}
    await limiter.set_limits(Scope("acme", key="k1"), own)
    await limiter.set_limits(
        Scope("acme", adapter="pirate"),
        {"concurrent_requests": 1, "when_redis_is_away": {"concurrent_requests": "closed"}},
    )
    server.terminate()
    with pytest.raises(ApiError) as caught:
        await limiter.reserve(asking(1))
    assert caught.value.fault is Fault.LIMITER_UNAVAILABLE
    assert (await limiter.reserve(replace(asking(10**6), adapter="poet"))).mode == "degraded"
    assert (await limiter.reserve(replace(asking(10**6), adapter="poet", key_id="k2"))).mode == "open"
    server.start()
    await limiter.set_limits(Scope("acme", adapter="pirate"), {"shadow": ["concurrent_requests"]})
    server.terminate()
    assert (await limiter.reserve(asking(1))).mode == "degraded"


async def test_what_is_owed_is_paid_though_no_caller_asks_for_anything(server, make):
    limiter = await make(lease_seconds=1.0)
    grant = await limiter.reserve(asking(500))
    server.terminate()
    for _ in range(FAILURES):
        await limiter.trouble()
    await limiter.settle(grant, 100)
    server.start()
    async with Redis(unix_socket_path=str(server.unix_socket_path)) as books:
        async with asyncio.timeout(60):
            while await books.keys("*lease:*"):
                await asyncio.sleep(0.02)
        assert float(await books.hget("loralane:bucket:{acme}:tenant", "today")) == 100


async def test_limits_cannot_be_changed_while_redis_is_away(server, make):
    limiter = await make()
    server.terminate()
    with pytest.raises(ApiError) as caught:
        await limiter.set_limits(Scope("acme"), {"requests_per_minute": 1})
    assert caught.value.fault is Fault.LIMITER_UNAVAILABLE
    assert await limiter.limits(Scope("acme")) == ACME.limits


async def test_a_start_without_redis_publishes_limits_when_it_comes(server, make):
    limiter = await make()
    await limiter.configure([Tenant("acme", limits=Limits(tokens_per_minute=10))])
    server.terminate()
    await limiter.configure([Tenant("acme", limits=Limits(tokens_per_minute=77))])
    assert (await limiter.reserve(asking(0))).tokens.limit == 77
    server.start()
    grant = await limiter.reserve(asking(0))
    assert (grant.source, grant.tokens.limit) == ("redis", 77)


async def test_leases_cannot_be_counted_while_redis_is_away(server, make):
    limiter = await make()
    server.terminate()
    with pytest.raises(StoreError):
        await limiter.outstanding()


async def test_a_mode_is_logged_when_it_changes_not_with_every_request(server, make):
    limiter = await make()
    with capture_logs() as logs:
        server.terminate()
        for _ in range(5):
            await limiter.reserve(asking(1))
        server.start()
        for _ in range(3):
            await limiter.reserve(asking(1))
    changes = [entry for entry in logs if entry["event"] == "limiter_mode_changed"]
    assert [entry["mode"] for entry in changes] == ["degraded", "redis"]
    assert changes[0]["reason"] and not changes[1]["reason"]


DAILY = Limits(tokens_per_day=330)


async def test_a_day_that_is_nearly_spent_stays_so_while_redis_is_away_and_after(server, make):
    """300 of 330 tokens a day are used. The local limiter grants the 30 that are left, and Redis counts them later."""
    limiter = await make()
    limiter.configure_lazily([Tenant("acme", limits=DAILY)])
    before = await limiter.reserve(asking(300))
    await limiter.settle(before, 300)
    server.terminate()
    assert isinstance(await attempt(limiter, asking(31)), ApiError)
    used = Counts(1, 10, 0, 20)
    alone = await limiter.reserve(replace(asking(30), used=lambda: used))
    assert alone.source == "local"
    assert isinstance(await attempt(limiter, asking(1)), ApiError)
    await limiter.settle(alone, 30)
    server.start()
    while limiter.mode != "redis" or limiter.undelivered_tokens:
        await limiter.trouble()
        await asyncio.sleep(0.02)
    assert isinstance(await attempt(limiter, asking(1)), ApiError)
    async with Redis(unix_socket_path=str(server.unix_socket_path)) as books:
        for scope in ("tenant", "key:k1", "adapter:pirate"):
            assert float(await books.hget(f"loralane:bucket:{{acme}}:{scope}", "today")) == 330, scope


async def test_requests_under_way_keep_their_slots_while_redis_is_away(server, make):
    limiter = await make()
    limiter.configure_lazily([Tenant("acme", limits=Limits(concurrent_requests=2))])
    first = await limiter.reserve(asking(1))
    server.terminate()
    second = await limiter.reserve(asking(1))
    assert (first.source, second.source) == ("redis", "local")
    assert isinstance(await attempt(limiter, asking(1)), ApiError)
    await limiter.settle(first, 1)
    third = await limiter.reserve(asking(1))
    assert isinstance(await attempt(limiter, asking(1)), ApiError)
    await limiter.settle(second, 1)
    await limiter.settle(third, 1)
    assert not limiter._local._elsewhere


async def test_slots_of_other_gateways_stay_taken_while_redis_is_away(server, make):
    """Limit 10, two gateways: one has 8 requests under way, the other 1. Together they never have more than 10."""
    gateways = [await make(replicas=2), await make(replicas=2)]
    await gateways[0].set_limits(Scope("acme"), {"concurrent_requests": 10, "tokens_per_minute": None})
    for gateway, count in zip(gateways, (8, 1), strict=True):
        for _ in range(count):
            assert (await gateway.reserve(asking(1))).source == "redis"
    server.terminate()
    answers = [await attempt(gateway, asking(1)) for gateway in gateways for _ in range(10)]
    assert sum(isinstance(answer, Grant) for answer in answers) <= 1


async def test_a_settlement_that_overtakes_a_grant_leaves_no_slot_of_another_gateway(server, make):
    """The answer to the second reservation still counts the first request, which its gateway is settling meanwhile."""
    limiter = await make()
    await limiter.set_limits(Scope("acme"), {"concurrent_requests": 2})
    first = await limiter.reserve(asking(1))
    await asyncio.gather(limiter.reserve(asking(1)), limiter.settle(first, 1))
    server.terminate()
    assert isinstance(await attempt(limiter, asking(1)), Grant)
    assert isinstance(await attempt(limiter, asking(1)), ApiError)


async def test_what_is_used_is_known_after_a_change_of_limits(server, make):
    limiter = await make()
    limiter.configure_lazily([Tenant("acme", limits=DAILY)])
    await limiter.reserve(asking(300))
    await limiter.set_limits(Scope("acme"), {"requests_per_minute": 1000})
    server.terminate()
    assert isinstance(await attempt(limiter, asking(31)), ApiError)
    assert isinstance(await attempt(limiter, asking(30)), Grant)


async def test_a_redis_that_is_slow_is_not_away(server, make):
    """Stopped for many times the time of a call: the reservation waits, and Redis decides it."""
    limiter = await make(patience=0.05)
    await limiter.reserve(asking(900))
    os.kill(server._process.pid, signal.SIGSTOP)
    asyncio.get_running_loop().call_later(0.3, os.kill, server._process.pid, signal.SIGCONT)
    refused = await attempt(limiter, asking(900))
    assert isinstance(refused, ApiError) and limiter.mode == "redis"


async def test_a_silent_redis_is_waited_for_once(server, make):
    limiter = await make(patience=0.01)
    await limiter.reserve(asking(1))
    os.kill(server._process.pid, signal.SIGSTOP)
    try:
        grants = await asyncio.gather(*(limiter.reserve(asking(1)) for _ in range(20)))
        assert {grant.source for grant in grants} == {"local"} and limiter.mode == "degraded"
    finally:
        os.kill(server._process.pid, signal.SIGCONT)


def test_a_breaker_opens_after_failures_in_a_row_and_probes_once_a_cooldown():
    now = 0.0
    breaker = Breaker(2, 5.0, lambda: now)
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert breaker.is_open
    assert not breaker.allows()
    now = 5.0
    assert [breaker.allows(), breaker.allows()] == [True, False]
    now = 10.0
    assert breaker.allows()
    breaker.succeeded()
    assert not breaker.is_open
    assert [breaker.allows(), breaker.allows()] == [True, True]
