"""Reserve and settle on a real Valkey: exact under concurrency, honest about waits, changeable live."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis
from structlog.testing import capture_logs

from gateway.core.bucket import DAY
from gateway.core.errors import ApiError, Fault
from gateway.core.limits import EACH, Limits, Scope
from gateway.core.tenants import Tenant
from gateway.limiter import published
from gateway.limiter.base import Grant, ReserveRequest, format_duration
from gateway.limiter.failover import FailoverLimiter
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import Correction, RedisLimiter
from gateway.redis.client import StoreError

PATIENT = 10.0
"""Seconds: no test depends on how fast this machine is."""
HUGE = 10**9
ACME = Scope("acme")


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


def asking(
    tokens: int, key: str = "k1", tenant: str = "acme", request_id: str = "r", adapter: str = "pirate"
) -> ReserveRequest:
    return ReserveRequest(request_id, tenant, key, tokens, adapter)


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


async def test_a_guess_yields_to_the_smallest_bucket_and_not_below_what_is_needed(make):
    limits, key_limits = Limits(tokens_per_minute=1000, tokens_per_day=5000), Limits(tokens_per_minute=400)
    limiter = await make(Tenant("acme", limits=limits, key_limits=key_limits))
    guess = replace(asking(3000), least=50)
    grant = await limiter.reserve(guess)
    assert (grant.reserved, grant.tokens.remaining) == (400, 0)
    await limiter.settle(grant, 100)
    assert (await refusal(limiter, replace(asking(3000), least=401))).fault is Fault.INSUFFICIENT_QUOTA
    assert (await refusal(limiter, guess)).fault is Fault.RATE_LIMIT_EXCEEDED
    assert (await limiter.reserve(replace(asking(60), least=50))).reserved == 60
    assert (await limiter.reserve(asking(0, tenant="unknown"))).reserved == 0


async def test_a_tenant_that_is_gone_takes_its_use_along(make):
    limiter = await make(Tenant("acme", limits=Limits(tokens_per_day=1000)))
    await limiter.settle(await limiter.reserve(asking(1000)), 1000)
    await limiter.set_limits(ACME, {"requests_per_minute": 1})
    await limiter.drop("acme")
    grant = await limiter.reserve(asking(1000))
    assert (grant.buckets[0].today.used, grant.requests) == (1000, None)


async def test_settling_gives_back_what_was_not_used_once(make):
    limiter = await make(Tenant("acme", limits=Limits(tokens_per_minute=1000)))
    grant = await limiter.reserve(asking(1000))
    for _ in range(3):
        await limiter.settle(grant, 400)
    await limiter.settle(grant, 0)
    assert 600 <= (await limiter.reserve(asking(0))).tokens.remaining < 700
    assert await limiter.outstanding() == 1


async def test_using_more_than_reserved_is_a_debt(make):
    limiter = await make(Tenant("acme", limits=Limits(tokens_per_minute=1000)))
    grant = await limiter.reserve(asking(100))
    await limiter.settle(grant, 3000)
    error = await refusal(limiter, asking(1))
    assert 115 < error.retry_after <= 120.06
    assert error.headers()["x-ratelimit-remaining-tokens"] == "0"


async def test_a_request_without_tokens_fits_beside_any_debt(make):
    limiter = await make(Tenant("acme", limits=Limits(2, 1000, tokens_per_day=2000)))
    await limiter.settle(await limiter.reserve(asking(100)), 3000)
    await limiter.settle(await limiter.reserve(asking(0)), 0)
    assert (await refusal(limiter, asking(0))).limit_kind == "requests"


async def test_a_check_refuses_beyond_limits_of_requests_alone_and_charges_nothing(make):
    limiter = await make(Tenant("acme", limits=Limits(2, 100, shadow=("tokens_per_minute",))))
    for _ in range(2):
        await limiter.check_requests(asking(0))
        await limiter.settle(await limiter.reserve(asking(100)), 100)
    with pytest.raises(ApiError) as caught:
        await limiter.check_requests(asking(0))
    assert caught.value.metadata == {"scope": "tenant:acme", "limit": "requests_per_minute", "value": "2"}
    assert 0 < caught.value.retry_after <= 30
    [tenant, *_] = await limiter.usage("acme")
    refused = {use.name: use.refused_today for use in tenant.limits}
    assert (refused["requests_per_minute"], refused["tokens_per_minute"]) == (1, 1)
    assert await limiter.outstanding() == 0


async def test_a_check_knows_running_requests(make):
    limiter = await make(Tenant("acme", limits=Limits(concurrent_requests=1)))
    grant = await limiter.reserve(asking(1))
    with pytest.raises(ApiError) as caught:
        await limiter.check_requests(asking(0))
    assert (caught.value.limit_kind, caught.value.retry_after) == ("requests", 1.0)
    await limiter.settle(grant, 1)
    await limiter.check_requests(asking(0))


async def test_a_grant_that_takes_the_last_slot_begins_the_checks(valkey):
    limiter = FailoverLimiter(RedisLimiter(valkey, timeout=PATIENT), LocalLimiter())
    await limiter.configure([Tenant("acme", limits=Limits(concurrent_requests=2))])
    grants = [await limiter.reserve(asking(1)) for _ in range(2)]
    with pytest.raises(ApiError):
        await limiter.check_requests(asking(1))
    await limiter.settle(grants.pop(), 1)
    await limiter.check_requests(asking(1))
    await limiter.settle(grants.pop(), 1)


async def test_redis_is_asked_beforehand_only_while_its_last_answer_left_no_room(valkey, monkeypatch):
    shared, operator = RedisLimiter(valkey, timeout=PATIENT), RedisLimiter(valkey, timeout=PATIENT)
    limiter, asked = FailoverLimiter(shared, LocalLimiter()), []
    check = shared.check_requests

    async def counted(request):
        asked.append(request)
        await check(request)

    monkeypatch.setattr(shared, "check_requests", counted)
    await limiter.configure([Tenant("acme", limits=Limits(requests_per_minute=2))])
    await limiter.check_requests(asking(1))
    await limiter.settle(await limiter.reserve(asking(1)), 1)
    await limiter.check_requests(asking(1))
    await operator.settle(await operator.reserve(asking(1)), 1)
    await limiter.check_requests(asking(1))
    assert asked == []
    await refusal(limiter, asking(1))
    with pytest.raises(ApiError):
        await limiter.check_requests(asking(1, key="k2"))
    await operator.set_limits(ACME, {"requests_per_minute": 1000})
    await limiter.check_requests(asking(1))
    assert len(asked) == 2
    await limiter.settle(await limiter.reserve(asking(1)), 1)
    await limiter.check_requests(asking(1))
    assert len(asked) == 2


async def test_a_request_that_failed_counts_without_its_tokens(make):
    limiter = await make(Tenant("acme", limits=Limits(2, 1000)))
    grant = await limiter.reserve(asking(1000))
    await limiter.settle(grant, 0)
    grant = await limiter.reserve(asking(1000))
    assert (grant.requests.remaining, grant.tokens.remaining) == (0, 0)
    assert (await refusal(limiter, asking(0))).metadata["limit"] == "requests_per_minute"


async def test_a_further_run_takes_a_slot_but_counts_no_further_request(make):
    limiter = await make(Tenant("acme", limits=Limits(1, None, concurrent_requests=1)))
    first = await limiter.reserve(asking(1))
    further = replace(asking(1), is_counted=True)
    assert (await refusal(limiter, further)).metadata["limit"] == "concurrent_requests"
    await limiter.settle(first, 1)
    await limiter.reserve(further)


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
    await limiter.settle(first, 0)
    await limiter.settle(first, 0)
    await limiter.settle(second, 400)
    assert (await limiter.reserve(asking(0))).tokens.remaining < 700


async def test_a_change_of_limits_binds_on_the_next_request(make):
    limiter = await make(Tenant("acme", limits=Limits(tokens_per_minute=1000)))
    await limiter.reserve(asking(800))
    assert await limiter.set_limits(ACME, {"tokens_per_minute": 500}) == Limits(tokens_per_minute=500)
    assert await limiter.limits(ACME) == Limits(tokens_per_minute=500)
    assert (await refusal(limiter, asking(1))).metadata["value"] == "500"
    await limiter.set_limits(ACME, {"tokens_per_minute": 2000})
    assert 1200 <= (await limiter.reserve(asking(0))).tokens.remaining < 2000
    await limiter.restore_limits(ACME)
    assert await limiter.limits(ACME) == Limits(tokens_per_minute=1000)


async def test_only_what_is_named_changes(make):
    limiter = await make(Tenant("acme", limits=Limits(10, 1000, shadow=("tokens_per_minute",))))
    changed = await limiter.set_limits(ACME, {"concurrent_requests": 4, "requests_per_minute": None})
    assert changed == Limits(None, 1000, 4, shadow=("tokens_per_minute",))
    assert await limiter.set_limits(ACME, {"shadow": []}) == Limits(None, 1000, 4)


async def test_one_key_can_be_limited_live(make):
    limiter = await make(Tenant("acme", key_limits=Limits(requests_per_minute=100, tokens_per_day=HUGE)))
    key = Scope("acme", key="k1")
    changed = await limiter.set_limits(key, {"requests_per_minute": 1})
    assert changed == Limits(requests_per_minute=1, tokens_per_day=HUGE), "it begins with what its tenant gives each"
    assert await limiter.limits(Scope("acme", key="k2")) == Limits(requests_per_minute=100, tokens_per_day=HUGE)
    await limiter.reserve(asking(1, "k1"))
    await refusal(limiter, asking(1, "k1"))
    await limiter.reserve(asking(1, "k2"))
    await limiter.restore_limits(key)
    await limiter.reserve(asking(1, "k1"))


async def test_what_each_key_gets_can_be_changed_live(make):
    limiter = await make(Tenant("acme"))
    await limiter.set_limits(Scope("acme", key=EACH), {"requests_per_minute": 1})
    for key in ("k1", "k2"):
        await limiter.reserve(asking(1, key))
        assert (await refusal(limiter, asking(1, key))).metadata["scope"] == f"key:{key}"


async def test_an_adapter_is_limited_within_its_tenant(make):
    limiter = await make(Tenant("acme", limits=Limits(tokens_per_minute=1000), adapter_limits=Limits(None, 400)))
    await limiter.reserve(asking(300, "k1", adapter="pirate"))
    error = await refusal(limiter, asking(300, "k2", adapter="pirate"))
    assert error.metadata == {"scope": "adapter:pirate", "limit": "tokens_per_minute", "value": "400"}
    await limiter.reserve(asking(300, "k2", adapter="poet"))
    await limiter.set_limits(Scope("acme", adapter="poet"), {"tokens_per_minute": 310})
    assert (await refusal(limiter, asking(300, adapter="poet"))).metadata["value"] == "310"


async def test_requests_at_once_are_limited_until_they_end(make):
    limiter = await make(Tenant("acme", limits=Limits(concurrent_requests=2)))
    first, _ = [await limiter.reserve(asking(HUGE)) for _ in range(2)]
    error = await refusal(limiter, asking(1))
    assert (error.fault, error.type, error.retry_after) == (Fault.RATE_LIMIT_EXCEEDED, "requests", 1.0)
    assert "2 requests at once" in error.message
    await limiter.settle(first, 5)
    await limiter.settle(first, 5)
    await limiter.reserve(asking(1))
    await refusal(limiter, asking(1))


async def test_a_limit_on_requests_at_once_counts_those_before_it(make):
    limiter = await make(Tenant("acme"))
    await limiter.reserve(asking(1))
    await limiter.set_limits(ACME, {"concurrent_requests": 1})
    assert (await refusal(limiter, asking(1))).metadata["limit"] == "concurrent_requests"


async def test_a_spent_day_is_not_worth_a_retry(make):
    limiter = await make(Tenant("acme", limits=Limits(tokens_per_day=1000)))
    grant = await limiter.reserve(asking(900))
    error = await refusal(limiter, asking(101))
    assert (error.fault, error.code, error.retry_after) == (Fault.INSUFFICIENT_QUOTA, "insufficient_quota", None)
    assert error.headers()["x-should-retry"] == "false"
    await limiter.settle(grant, 200)
    await limiter.settle(await limiter.reserve(asking(101)), 5000)
    assert (await refusal(limiter, asking(1))).metadata["limit"] == "tokens_per_day"
    await limiter.forget_use(ACME)
    await limiter.reserve(asking(1000))


async def test_a_limit_in_shadow_counts_and_admits(make):
    shadow = ("tokens_per_minute", "concurrent_requests")
    limiter = await make(Tenant("acme", limits=Limits(100, 1000, 2, shadow=shadow)))
    grants = [await limiter.reserve(asking(400)) for _ in range(4)]
    assert [grant.shadowed for grant in grants] == [
        (),
        (),
        (("tenant", "tokens_per_minute"), ("tenant", "concurrent_requests")),
        (("tenant", "tokens_per_minute"), ("tenant", "concurrent_requests")),
    ]
    assert "x-ratelimit-limit-tokens" not in grants[-1].headers(), "no client is told of a limit that does not bind"
    [scope, *_] = await limiter.usage("acme")
    uses = {use.name: use for use in scope.limits}
    assert (uses["tokens_per_minute"].refused_today, uses["tokens_per_minute"].shadow) == (2, True)
    assert 700 < uses["tokens_per_minute"].used <= 800, "charged with what it would have admitted"
    assert (uses["concurrent_requests"].used, uses["requests_per_minute"].refused_today) == (4, 0)
    await limiter.set_limits(ACME, {"shadow": []})
    await refusal(limiter, asking(300))


async def test_usage_names_every_scope_in_use(make):
    limiter = await make(Tenant("acme", limits=Limits(10, 1000, 5, 10_000)))
    await limiter.set_limits(Scope("acme", adapter="poet"), {"tokens_per_day": 50})
    await limiter.settle(await limiter.reserve(asking(300, "k1")), 100)
    await limiter.reserve(asking(200, "k2"))
    await refusal(limiter, asking(60, "k2", adapter="poet"))
    used = {str(scope.scope): {use.name: use for use in scope.limits} for scope in await limiter.usage("acme")}
    assert list(used) == ["tenant:acme", "key:k1", "key:k2", "adapter:pirate", "adapter:poet"]
    acme = used["tenant:acme"]
    assert 290 < acme["tokens_per_minute"].used <= 300
    assert 700 <= acme["tokens_per_minute"].remaining < 710
    assert (acme["concurrent_requests"].used, acme["concurrent_requests"].remaining) == (1, 4)
    assert (acme["tokens_per_day"].used, acme["tokens_per_day"].remaining) == (300, 9700)
    assert 0 < acme["tokens_per_day"].reset_seconds <= 86_400
    assert (used["key:k1"]["tokens_per_day"].used, used["key:k2"]["tokens_per_day"].used) == (100, 200)
    assert (used["adapter:poet"]["tokens_per_day"].refused_today, used["adapter:poet"]["tokens_per_day"].used) == (1, 0)


async def test_use_can_be_forgotten_without_losing_count_of_what_runs(make):
    limiter = await make(Tenant("acme", limits=Limits(tokens_per_minute=1000, concurrent_requests=2)))
    early = await limiter.reserve(asking(1000))
    await limiter.forget_use(ACME)
    await limiter.reserve(asking(900))
    assert (await refusal(limiter, asking(0))).metadata["limit"] == "concurrent_requests"
    await limiter.settle(early, 0)
    assert (await limiter.reserve(asking(0))).tokens.remaining < 200, "what was forgotten is not given back as well"


async def test_a_limit_that_appears_later_refunds_nothing_that_was_not_charged(make):
    limiter = await make(Tenant("acme"))
    early = await limiter.reserve(asking(900))
    await limiter.set_limits(ACME, {"tokens_per_minute": 1000})
    await limiter.reserve(asking(1000))
    await limiter.settle(early, 0)
    assert (await refusal(limiter, asking(500))).type == "tokens"


async def test_live_limits_outlast_a_restart_and_configured_ones_do_not(shared, valkey):
    await shared.configure([Tenant("acme", limits=Limits(10)), Tenant("globex", limits=Limits(10))])
    await shared.set_limits(ACME, {"requests_per_minute": 5})
    restarted = RedisLimiter(valkey, timeout=PATIENT)
    await restarted.configure([Tenant("acme", limits=Limits(20)), Tenant("globex", limits=Limits(20))])
    assert await restarted.limits(ACME) == Limits(5)
    assert await restarted.limits(Scope("globex")) == Limits(20)


async def test_live_tenant_limits_leave_those_of_its_keys(shared):
    await shared.configure([Tenant("acme", limits=Limits(10), key_limits=Limits(3))])
    await shared.set_limits(ACME, {"requests_per_minute": 5})
    assert await shared.limits(Scope("acme", key="k1")) == Limits(3)


async def test_gateways_share_one_bucket(shared, valkey):
    other = RedisLimiter(Redis(connection_pool=valkey.connection_pool), timeout=PATIENT)
    tenants = [Tenant("acme", limits=Limits(tokens_per_minute=1000))]
    await shared.configure(tenants)
    await other.configure(tenants)
    grant = await shared.reserve(asking(600))
    await refusal(other, asking(600))
    await other.settle(grant, 0)
    await other.reserve(asking(900))


async def test_three_gateways_admit_together_exactly_what_fits(valkey_server, valkey):
    clients = [Redis.from_url(valkey_server.connection_url) for _ in range(3)]
    gateways = [RedisLimiter(client, timeout=PATIENT) for client in clients]
    for gateway in gateways:
        await gateway.configure([Tenant("acme", limits=Limits(tokens_per_minute=1000))])
    answers = await asyncio.gather(*(attempt(gateways[number % 3], asking(300)) for number in range(50)))
    assert sum(isinstance(answer, Grant) for answer in answers) == 3
    await gateways[1].set_limits(ACME, {"tokens_per_minute": 100})
    assert {(await refusal(gateway, asking(1))).metadata["value"] for gateway in gateways} == {"100"}
    for client in clients:
        await client.aclose()


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
        decision = await shared.send_reservation(grant)
        assert decision.admitted
    assert 400 <= decision.buckets[0].tokens.allowance.remaining < 500


async def test_every_key_is_declared_and_lies_in_one_cluster_slot(shared, valkey):
    await shared.configure([Tenant("acme", limits=Limits(10, 1000), key_limits=Limits(10, 1000))])
    grant = await shared.reserve(asking(10))
    used = {key.decode() for key in await valkey.keys("*")}
    scopes = ("tenant", "key:k1", "adapter:pirate")
    assert used == {
        "loralane:limits:{acme}",
        "loralane:scopes:{acme}",
        f"loralane:lease:{{acme}}:{grant.lease}",
        *(f"loralane:{kind}:{{acme}}:{scope}" for kind in ("bucket", "running") for scope in scopes),
    }
    assert used <= set(shared.keys(grant))
    slots = {await valkey.execute_command("CLUSTER KEYSLOT", key) for key in shared.keys(grant)}
    assert len(slots) == 1


async def test_everything_but_limits_expires_by_itself(shared, valkey):
    await shared.configure([Tenant("acme", limits=Limits(10, 1000))])
    await shared.reserve(asking(10))
    for key in await valkey.keys("*"):
        assert (await valkey.pttl(key) > 0) == (b"limits" not in key)
    assert await valkey.ttl("loralane:bucket:{acme}:tenant") > 172_700, (
        "until the end of the next day, whenever this is"
    )


async def test_a_bucket_that_cannot_be_read_is_a_store_that_is_away(shared, valkey):
    await shared.configure([Tenant("acme", limits=Limits(10, 1000))])
    await shared.reserve(asking(10))
    await valkey.hset("loralane:bucket:{acme}:tenant", "today", "1e19")
    with pytest.raises(StoreError, match="cannot be read"):
        await shared.reserve(asking(10))
    with pytest.raises(StoreError, match="cannot be read"):
        await shared.usage("acme")


async def test_a_debt_is_not_forgotten_before_it_has_drained(shared, valkey):
    await shared.configure([Tenant("acme", limits=Limits(tokens_per_minute=10))])
    await shared.settle(await shared.reserve(asking(10)), 50_000)
    assert await valkey.ttl("loralane:bucket:{acme}:tenant") > 299_000, "5,000 minutes"


async def test_slots_of_a_gateway_that_died_come_free_within_their_term(valkey):
    tenants = [Tenant("acme", limits=Limits(concurrent_requests=2))]
    dying, other = (RedisLimiter(valkey, timeout=PATIENT, lease_seconds=2.0) for _ in range(2))
    await dying.configure(tenants)
    grants = [await dying.reserve(asking(1)) for _ in range(2)]
    dying.leases.stop()
    await refusal(other, asking(1))
    expiries = [score for _, score in await valkey.zrange("loralane:running:{acme}:tenant", 0, -1, withscores=True)]
    seconds, microseconds = await valkey.time()
    assert all(expiry <= seconds * 1000 + microseconds / 1000 + 2000 for expiry in expiries)
    while await valkey.time() <= (max(expiries) / 1000, 0):
        await asyncio.sleep(0.05)
    await other.reserve(asking(1))
    assert await dying.renew(grants[0]), "it lived after all: its slot is taken again"
    await refusal(other, asking(1))


@pytest.mark.parametrize("settles_first", [False, True])
async def test_leases_of_the_dead_go_on_a_scopes_first_write_of_a_day(shared, valkey, settles_first):
    """Whichever that is: a request that runs over midnight writes before the day's first reservation."""
    await shared.configure([Tenant("acme", limits=Limits(tokens_per_minute=1000))])
    over_midnight = await shared.reserve(asking(1))
    for scope in [each.name for each in over_midnight.request.scopes]:
        await valkey.zadd(f"loralane:running:{{acme}}:{scope}", {"dead": 1})
        await valkey.hincrby(f"loralane:bucket:{{acme}}:{scope}", "at", -DAY)
    if settles_first:
        await shared.settle(over_midnight, 1)
    await shared.reserve(asking(1))
    for scope in [each.name for each in over_midnight.request.scopes]:
        leases = await valkey.zrange(f"loralane:running:{{acme}}:{scope}", 0, -1)
        assert b"dead" not in leases and len(leases) == 2 - settles_first


async def test_slots_are_kept_for_as_long_as_requests_run(valkey):
    limiter = RedisLimiter(valkey, timeout=PATIENT, lease_seconds=0.6)
    await limiter.configure([Tenant("acme", limits=Limits(concurrent_requests=1))])
    grant = await limiter.reserve(asking(1))
    [(_, first)] = await valkey.zrange("loralane:running:{acme}:tenant", 0, -1, withscores=True)
    while (await valkey.time())[0] * 1000 <= first:
        await asyncio.sleep(0.05)
    async with asyncio.timeout(30):  # a slot that was renewed late is taken again
        while isinstance(visitor := await attempt(limiter, asking(1)), Grant):
            await limiter.settle(visitor, 0)
    await limiter.settle(grant, 1)
    assert not await limiter.renew(grant)
    await limiter.reserve(asking(1))
    await limiter.close()


async def test_limits_that_are_lost_again_and_again_are_a_store_that_is_away(shared, valkey, monkeypatch):
    async def lost(tenant):
        await valkey.flushall()

    await shared.configure([Tenant("acme", limits=Limits(tokens_per_minute=10))])
    await valkey.flushall()
    monkeypatch.setattr(shared._published, "publish", lost)
    with capture_logs() as logs:
        grant = await FailoverLimiter(shared, LocalLimiter()).reserve(asking(1))
    assert grant.source == "local"
    assert [(line["event"], line["tenant"]) for line in logs] == [("limits_lost", "acme")]


async def test_a_debt_outlives_the_idle_time(shared, valkey):
    await shared.configure([Tenant("acme", limits=Limits(tokens_per_minute=10))])
    await shared.settle(await shared.reserve(asking(10)), 10_000)
    assert await valkey.ttl("loralane:bucket:{acme}:tenant") > 50_000


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
                await limiter.settle(answer, 0)
    await limiter.close()
    assert await limiter.outstanding() == 0
    assert (await limiter.reserve(asking(0))).tokens.remaining == HUGE


async def test_a_reservation_that_arrives_after_it_was_given_up_charges_nothing(shared):
    await shared.configure([Tenant("acme", limits=Limits(tokens_per_minute=1000))])
    grant = Grant("late", asking(600), "redis")
    await shared.send(Correction(grant, 0, 0, uncertain=True))
    await shared.send_reservation(grant)
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


async def test_a_tenant_has_live_limits_for_at_most_so_many_scopes(shared, monkeypatch):
    monkeypatch.setattr(published, "MOST_SCOPES", 5)
    limiter = FailoverLimiter(shared, LocalLimiter())
    await limiter.configure([Tenant("acme"), Tenant("globex")])
    for name in ("one", "two"):
        await limiter.set_limits(Scope("acme", adapter=name), {"tokens_per_day": 5})
    with pytest.raises(ApiError, match="tenant acme has limits for 5 scopes, the maximum; reset some") as caught:
        await limiter.set_limits(Scope("acme", adapter="three"), {"tokens_per_day": 5})
    assert (caught.value.fault, caught.value.param) == (Fault.TENANT_CONFLICT, "adapter")
    assert len(await limiter.entries("acme")) == 5
    await limiter.set_limits(Scope("acme", adapter="two"), {"tokens_per_day": 6})
    await limiter.set_limits(Scope("globex", adapter="three"), {"tokens_per_day": 5})
    await limiter.restore_limits(Scope("acme", adapter="one"))
    await limiter.set_limits(Scope("acme", key="k"), {"tokens_per_day": 5})
