"""When a request was last refused and by which limits, as both limiters remember it."""

from __future__ import annotations

import time

import pytest

from gateway.core.errors import ApiError
from gateway.core.limits import Limits, Scope
from gateway.core.tenants import Tenant
from gateway.limiter.base import ReserveRequest
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter

TENANT = Tenant(
    "acme", limits=Limits(tokens_per_minute=100, requests_per_minute=50), key_limits=Limits(tokens_per_day=10)
)


@pytest.fixture(params=["local", "redis"])
async def limiter(request, valkey):
    made = LocalLimiter() if request.param == "local" else RedisLimiter(valkey, timeout=5.0)
    await made.configure([TENANT])
    yield made
    await made.close()


async def refuse(limiter, tokens):
    with pytest.raises(ApiError):
        await limiter.reserve(ReserveRequest("r", "acme", "k1", tokens, "tiny"))


async def last(limiter):
    """Return the time of the last refusal and the limits that caused it, by scope name."""
    return {used.scope.name: (used.refused_at, used.refused_by) for used in await limiter.usage("acme")}


async def test_it_is_remembered_where_the_request_did_not_fit(limiter):
    before = time.time()
    await refuse(limiter, 500)
    found = await last(limiter)
    assert [found[name][1] for name in ("tenant", "key:k1")] == [("tokens_per_minute",), ("tokens_per_day",)]
    assert before - 1 < found["tenant"][0] < time.time() + 1
    await refuse(limiter, 50)
    again = await last(limiter)
    assert again["tenant"] == found["tenant"], "that one would have fitted here"
    assert again["key:k1"][0] > found["key:k1"][0]


async def test_a_limit_in_shadow_refuses_no_request(limiter):
    await limiter.set_limits(Scope("acme", key="*"), {"shadow": ["tokens_per_day"]})
    await limiter.reserve(ReserveRequest("r", "acme", "k1", 50, "tiny"))
    assert {at for at, _ in (await last(limiter)).values()} == {None}
    await refuse(limiter, 500)
    found = await last(limiter)
    assert found["tenant"][1] == ("tokens_per_minute",) and found["key:k1"] == (None, ())


async def test_forgetting_what_is_in_use_forgets_it_too(limiter):
    await refuse(limiter, 500)
    await limiter.forget_use(Scope("acme"))
    assert (await last(limiter)).get("tenant", (None, ())) == (None, ())


async def refused_today(limiter):
    return sum(limit.refused_today for used in await limiter.usage("acme") for limit in used.limits)


async def test_forgetting_what_is_in_use_forgets_how_often_a_request_was_refused(limiter):
    await refuse(limiter, 500)
    assert await refused_today(limiter) == 2
    for scope in (Scope("acme"), Scope("acme", key="k1")):
        await limiter.forget_use(scope)
    assert await refused_today(limiter) == 0


async def test_a_tenant_that_is_removed_and_comes_back_was_never_refused(limiter):
    await refuse(limiter, 500)
    await limiter.drop("acme")
    await limiter.configure([TENANT])
    assert await refused_today(limiter) == 0
