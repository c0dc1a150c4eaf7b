"""Reserve and settle on a real Valkey: exact under concurrency, honest about waits, changeable live."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from gateway.core.errors import ApiError, Fault
from gateway.core.tenants import Limits, Tenant
from gateway.limiter.base import Grant, ReserveRequest, format_duration
from gateway.limiter.failover import FailoverLimiter
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter

PATIENT = 10.0
"""Seconds: no test depends on how fast this machine is."""
HUGE = 10**9


@pytest.fixture(params=["redis", "local"])
async def make(request, valkey: Redis):
    """Builds a limiter with the given tenants; both kinds must pass every test that uses it."""

    async def build(*tenants: Tenant):
        limiter = RedisLimiter(valkey, timeout=PATIENT) if request.param == "redis" else LocalLimiter()
        await limiter.configure(tenants)
        return limiter

    return build


@pytest.fixture
def shared(valkey: Redis):
    return RedisLimiter(valkey, timeout=PATIENT)


def asking(tokens: int, key: str = "k1", tenant: str = "acme", request_id: str = "r") -> ReserveRequest:
    return ReserveRequest(request_id, tenant, key, tokens)


async def attempt(limiter, request: ReserveRequest) -> Grant | ApiError:
    try:
        return await limiter.reserve(request)
    except ApiError as error:
        return error


async def refusal(limiter, request: ReserveRequest) -> ApiError:
    answer = await attempt(limiter, request)
    assert isinstance(answer, ApiError)
    return answer


async def test_fifty_at_once_admit_exactly_what_fits(make):
    limiter = await make(Tenant("acme", limits=Limits(tokens_per_minute=1000)))
    answers = await asyncio.gather(*(attempt(limiter, asking(300)) for _ in range(50)))
    grants = [answer for answer in answers if isinstance(answer, Grant)]
    refusals = [answer for answer in answers if isinstance(answer, ApiError)]
    assert len(grants) == 3
    assert {error.fault for error in refusals} == {Fault.RATE_LIMIT_EXCEEDED}
    assert await limiter.outstanding() == 3


async def test_a_refusal_is_true_and_complete(make):
    limiter = await make(Tenant("acme", limits=Limits(100, 1000)))
    for _ in range(3):
        await limiter.reserve(asking(300))
    error = await refusal(limiter, asking(300))
    assert (error.http_status, error.type, error.code) == (429, "tokens", "rate_limit_exceeded")
    assert 0 < error.retry_after <= 12.0
    assert error.metadata == {"scope": "tenant:acme", "limit": "tokens_per_minute", "value": "1000"}
    headers = error.headers()
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert headers["x-ratelimit-limit-requests"] == "100"
    assert 100 <= int(headers["x-ratelimit-remaining-tokens"]) < 400
    assert {"retry-after", "retry-after-ms", "x-ratelimit-reset-tokens"} <= set(headers)


async def test_refused_requests_consume_nothing(make):
    limiter = await make(Tenant("acme", limits=Limits(10, 1000)))
    await limiter.reserve(asking(900))
    for _ in range(20):
        await refusal(limiter, asking(500))
    grant = await limiter.reserve(asking(50))
    assert grant.requests.remaining == 8
    assert grant.tokens.remaining >= 50


async def test_requests_are_limited_too(make):
    limiter = await make(Tenant("acme", limits=Limits(2, None)))
    await limiter.reserve(asking(HUGE))
    await limiter.reserve(asking(HUGE))
    error = await refusal(limiter, asking(1))
    assert (error.type, error.metadata["limit"]) == ("requests", "requests_per_minute")
    assert 0 < error.retry_after <= 30.0


async def test_more_than_a_bucket_holds_is_never_worth_a_retry(make):
    limiter = await make(Tenant("acme", limits=Limits(tokens_per_minute=1000)))
    error = await refusal(limiter, asking(1001))
    assert (error.fault, error.retry_after) == (Fault.INSUFFICIENT_QUOTA, None)
    assert error.headers()["x-should-retry"] == "false"
    await limiter.reserve(asking(1000))


async def test_settling_gives_back_what_was_not_used_once(make):
    limiter = await make(Tenant("acme", limits=Limits(tokens_per_minute=1000)))
    grant = await limiter.reserve(asking(1000))
    for _ in range(3):
        await limiter.settle(grant, 400)
    await limiter.refund(grant)
    assert 600 <= (await limiter.reserve(asking(0))).tokens.remaining < 700
    assert await limiter.outstanding() == 1


async def test_using_more_than_reserved_is_a_debt(make):
    limiter = await make(Tenant("acme", limits=Limits(tokens_per_minute=1000)))
    grant = await limiter.reserve(asking(100))
    await limiter.settle(grant, 3000)
    error = await refusal(limiter, asking(1))
    assert 115 < error.retry_after <= 120.06
    assert error.headers()["x-ratelimit-remaining-tokens"] == "0"


async def test_a_refund_gives_back_the_request_as_well(make):
    limiter = await make(Tenant("acme", limits=Limits(1, 1000)))
    grant = await limiter.reserve(asking(1000))
    await limiter.refund(grant)
    await limiter.settle(grant, 1000)
    grant = await limiter.reserve(asking(1000))
    assert (grant.requests.remaining, grant.tokens.remaining) == (0, 0)


async def test_a_key_is_limited_within_its_tenant(make):
    limiter = await make(
        Tenant("acme", limits=Limits(tokens_per_minute=1000), key_limits=Limits(tokens_per_minute=400))
    )
    grant = await limiter.reserve(asking(300, "k1"))
    assert grant.headers()["x-ratelimit-limit-tokens"] == "400"
    error = await refusal(limiter, asking(300, "k1"))
    assert error.metadata["scope"] == "key:k1"
    await limiter.reserve(asking(300, "k2"))
    grant = await limiter.reserve(asking(300, "k3"))
    assert grant.tokens.remaining == pytest.approx(100, abs=60)
    assert (await refusal(limiter, asking(400, "k4"))).metadata["scope"] == "tenant:acme"


async def test_tenants_do_not_touch_each_other(make):
    limits = Limits(tokens_per_minute=1000)
    limiter = await make(Tenant("acme", limits=limits), Tenant("globex", limits=limits))
    await limiter.reserve(asking(1000, tenant="acme"))
    assert (await limiter.reserve(asking(0, tenant="globex"))).tokens.remaining == 1000


async def test_no_limits_no_headers(make):
    limiter = await make(Tenant("acme"))
    grant = await limiter.reserve(asking(HUGE))
    assert grant.headers() == {}
    await limiter.settle(grant, 5)
    assert await limiter.outstanding() == 0


async def test_one_lease_each_even_where_request_ids_repeat(make):
    limiter = await make(Tenant("acme", limits=Limits(tokens_per_minute=1000)))
    first, second = [await limiter.reserve(asking(400, request_id="same")) for _ in range(2)]
    await limiter.refund(first)
    await limiter.refund(first)
    await limiter.settle(second, 400)
    assert (await limiter.reserve(asking(0))).tokens.remaining < 700


async def test_a_change_of_limits_binds_on_the_next_request(make):
    limiter = await make(Tenant("acme", limits=Limits(tokens_per_minute=1000)))
    await limiter.reserve(asking(800))
    await limiter.set_limits("acme", Limits(tokens_per_minute=500))
    assert await limiter.limits("acme") == Limits(tokens_per_minute=500)
    assert (await refusal(limiter, asking(1))).metadata["value"] == "500"
    await limiter.set_limits("acme", Limits(tokens_per_minute=2000))
    assert 1200 <= (await limiter.reserve(asking(0))).tokens.remaining < 2000
    await limiter.set_limits("acme", None)
    assert await limiter.limits("acme") == Limits(tokens_per_minute=1000)


async def test_one_key_can_be_limited_live(make):
    limiter = await make(Tenant("acme", key_limits=Limits(requests_per_minute=100)))
    await limiter.set_limits("acme", Limits(requests_per_minute=1), "k1")
    assert await limiter.limits("acme", "k1") == Limits(requests_per_minute=1)
    assert await limiter.limits("acme", "k2") == Limits(requests_per_minute=100)
    await limiter.reserve(asking(1, "k1"))
    await refusal(limiter, asking(1, "k1"))
    await limiter.reserve(asking(1, "k2"))
    await limiter.set_limits("acme", None, "k1")
    await limiter.reserve(asking(1, "k1"))


async def test_a_limit_that_appears_later_refunds_nothing_that_was_not_charged(make):
    limiter = await make(Tenant("acme"))
    early = await limiter.reserve(asking(900))
    await limiter.set_limits("acme", Limits(tokens_per_minute=1000))
    await limiter.reserve(asking(1000))
    await limiter.settle(early, 0)
    assert (await refusal(limiter, asking(500))).type == "tokens"


async def test_live_limits_outlast_a_restart_and_configured_ones_do_not(shared, valkey):
    await shared.configure([Tenant("acme", limits=Limits(10)), Tenant("globex", limits=Limits(10))])
    await shared.set_limits("acme", Limits(5))
    restarted = RedisLimiter(valkey, timeout=PATIENT)
    await restarted.configure([Tenant("acme", limits=Limits(20)), Tenant("globex", limits=Limits(20))])
    assert await restarted.limits("acme") == Limits(5)
    assert await restarted.limits("globex") == Limits(20)


async def test_live_tenant_limits_leave_those_of_its_keys(shared):
    await shared.configure([Tenant("acme", limits=Limits(10), key_limits=Limits(3))])
    await shared.set_limits("acme", Limits(5))
    assert await shared.limits("acme", "k1") == Limits(3)


async def test_gateways_share_one_bucket(shared, valkey):
    other = RedisLimiter(Redis(connection_pool=valkey.connection_pool), timeout=PATIENT)
    tenants = [Tenant("acme", limits=Limits(tokens_per_minute=1000))]
    await shared.configure(tenants)
    await other.configure(tenants)
    grant = await shared.reserve(asking(600))
    await refusal(other, asking(600))
    await other.settle(grant, 0)
    await other.reserve(asking(900))


async def test_scripts_forgotten_by_the_server_are_sent_again(shared, valkey):
    await shared.configure([Tenant("acme", limits=Limits(tokens_per_minute=1000))])
    grant = await shared.reserve(asking(1000))
    await valkey.script_flush()
    await shared.settle(grant, 0)
    await valkey.script_flush()
    await shared.reserve(asking(1000))


async def test_a_flushed_database_does_not_mean_no_limits(shared, valkey):
    await shared.configure([Tenant("acme", limits=Limits(1))])
    await shared.reserve(asking(1))
    await valkey.flushall()
    await shared.reserve(asking(1))
    await refusal(shared, asking(1))


async def test_a_repeated_reservation_is_charged_once(shared):
    await shared.configure([Tenant("acme", limits=Limits(tokens_per_minute=1000))])
    grant = Grant("lease-1", asking(600), "redis")
    for _ in range(3):
        admitted, buckets = await shared._ask(grant)
        assert admitted
    assert 400 <= buckets[0].tokens.allowance.remaining < 500


async def test_every_key_is_declared_and_lies_in_one_cluster_slot(shared, valkey):
    await shared.configure([Tenant("acme", limits=Limits(10, 1000), key_limits=Limits(10, 1000))])
    grant = await shared.reserve(asking(10))
    used = {key.decode() for key in await valkey.keys("*")}
    assert used == {
        "loralane:limits:{acme}",
        "loralane:bucket:{acme}",
        "loralane:bucket:{acme}:k1",
        f"loralane:lease:{{acme}}:{grant.lease}",
    }
    assert used <= set(shared._keys(grant))
    slots = {await valkey.execute_command("CLUSTER KEYSLOT", key) for key in shared._keys(grant)}
    assert len(slots) == 1


async def test_everything_but_limits_expires_by_itself(shared, valkey):
    await shared.configure([Tenant("acme", limits=Limits(10, 1000))])
    await shared.reserve(asking(10))
    for key in await valkey.keys("*"):
        assert (await valkey.pttl(key) > 0) == (b"limits" not in key)
    assert await valkey.ttl("loralane:bucket:{acme}") > 3500, "a limit lowered soon must not find use forgotten"


async def test_a_debt_outlives_the_idle_time(shared, valkey):
    await shared.configure([Tenant("acme", limits=Limits(tokens_per_minute=10))])
    await shared.settle(await shared.reserve(asking(10)), 10_000)
    assert await valkey.ttl("loralane:bucket:{acme}") > 50_000


async def test_callers_who_leave_while_asking_leave_nothing_behind(valkey):
    limiter = FailoverLimiter(RedisLimiter(valkey, timeout=PATIENT), LocalLimiter())
    await limiter.configure([Tenant("acme", limits=Limits(None, HUGE))])
    for ticks in range(12):
        tasks = [asyncio.create_task(limiter.reserve(asking(100))) for _ in range(5)]
        for _ in range(ticks):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, Grant):
                await limiter.refund(answer)
    await limiter.close()
    assert await limiter.outstanding() == 0
    assert (await limiter.reserve(asking(0))).tokens.remaining == HUGE


async def test_a_reservation_that_arrives_after_it_was_given_up_charges_nothing(shared):
    await shared.configure([Tenant("acme", limits=Limits(tokens_per_minute=1000))])
    grant = Grant("late", asking(600), "redis")
    await shared._run(shared._settle_script, shared._keys(grant), [0, 0, 1])
    await shared._ask(grant)
    assert await shared.outstanding() == 0
    assert (await shared.reserve(asking(0))).tokens.remaining == 1000


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (1, "1s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (3600, "1h0m0s"),
        (3661.5, "1h1m1.5s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds, text):
    assert format_duration(seconds) == text
