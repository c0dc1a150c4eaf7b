"""After a clock is set back, as when a replica whose clock is behind takes over, full buckets drain from then on."""

from __future__ import annotations

import pytest
from lua_clock import lua_clock

from gateway.core.bucket import DAY, MINUTE
from gateway.core.errors import ApiError
from gateway.core.limits import Limits
from gateway.core.tenants import Tenant
from gateway.limiter.base import Grant, ReserveRequest
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter

SECOND = 1_000_000
ACME = Tenant("acme", limits=Limits(30, 6000, 4, 9000))


@pytest.fixture(params=["redis", "local"])
async def limited(request, valkey):
    """A limiter of either kind and its clock, which stands at noon."""
    with lua_clock(valkey) as clock:
        await clock.move()
        limiter = RedisLimiter(valkey, timeout=10.0) if request.param == "redis" else LocalLimiter(clock=clock)
        await limiter.configure([ACME])
        yield limiter, clock
        await limiter.close()


async def attempt(limiter, tokens: int = 1) -> Grant | ApiError:
    try:
        return await limiter.reserve(ReserveRequest("r", "acme", "k1", tokens, "pirate"))
    except ApiError as error:
        return error


async def spend(limiter, num_requests: int, tokens: int) -> None:
    for _ in range(num_requests):
        await limiter.settle(await attempt(limiter, tokens), tokens)


@pytest.mark.parametrize("back", [150 * SECOND, 1, DAY])
async def test_a_full_bucket_has_room_again_when_its_refusal_says_so(limited, back):
    limiter, clock = limited
    await spend(limiter, 30, 1)
    await clock.move(-back)
    refused = await attempt(limiter)
    assert (refused.metadata["limit"], refused.retry_after) == ("requests_per_minute", 2.0)
    await clock.move(int(refused.retry_after * SECOND) - 1000)
    assert isinstance(await attempt(limiter), ApiError)
    await clock.move(1000)
    assert isinstance(await attempt(limiter), Grant)


async def test_a_check_of_requests_starts_the_draining_too(limited):
    limiter, clock = limited
    await spend(limiter, 30, 1)
    await clock.move(-150 * SECOND)
    with pytest.raises(ApiError):
        await limiter.check_requests(ReserveRequest("r", "acme", "k1", 0, "pirate"))
    await clock.move(2 * SECOND)
    await limiter.check_requests(ReserveRequest("r", "acme", "k1", 0, "pirate"))


async def test_nothing_is_forgotten_of_a_day_that_begins_twice(limited):
    limiter, clock = limited
    await clock.move(DAY // 2 + 10 * SECOND)
    await spend(limiter, 2, 3000)
    await clock.move(-20 * SECOND)
    assert [usage.used for usage in (await limiter.usage("acme"))[0].limits if usage.name == "tokens_per_day"] == [6000]
    await clock.move(MINUTE)
    assert isinstance(await attempt(limiter, 4000), Grant), "it is the next day, by any clock"


async def test_slots_of_a_gateway_that_died_end_when_they_would_have_ended(valkey):
    with lua_clock(valkey) as clock:
        await clock.move()
        limiter = RedisLimiter(valkey, timeout=10.0, lease_seconds=30.0)
        await limiter.configure([ACME])
        grants = [await attempt(limiter) for _ in range(4)]
        await clock.move(-150 * SECOND)
        for seconds in (29, 2):
            await limiter.renew(grants[0])
            assert (await attempt(limiter)).metadata["limit"] == "concurrent_requests"
            await clock.move(seconds * SECOND)
        assert [isinstance(await attempt(limiter), Grant) for _ in range(4)] == [True, True, True, False]
        await limiter.close()
