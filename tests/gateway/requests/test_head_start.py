"""Requests that begin while Redis is asked: what they gain, and that nothing is left of one that is refused."""

import asyncio
from contextlib import suppress

import pytest
from fakes import BASE, GatewayApp, build_gateway_app, principal
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from records import make_request

from engine.core.messages.requests import Lane
from engine.rpc.stream import EngineUnavailable
from gateway.core.bucket import Bucket, CountMeter, Meter
from gateway.core.budget import reserve
from gateway.core.errors import ApiError, Fault
from gateway.core.limits import Limits
from gateway.core.tenants import Tenant
from gateway.limiter.base import Grant, ReserveRequest
from gateway.limiter.failover import FailoverLimiter
from gateway.limiter.local import LocalLimiter
from gateway.redis.client import StoreError
from gateway.requests.settings import ServiceSettings
from gateway.requests.types import GenerateRequest


def asking(tokens: int = 100, adapter: str = BASE, tenant: str = "acme") -> ReserveRequest:
    return ReserveRequest("req-1", tenant, "k1", tokens, adapter)


class Shared(LocalLimiter):
    """Stands in for the limiter in Redis. It answers once `may_answer` is set."""

    available = True

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.is_away = False

    async def reserve(self, request: ReserveRequest) -> Grant:
        await self.may_answer.wait()
        if self.is_away:
            raise StoreError("gone")
        return await super().reserve(request)


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
async def limiter(shared) -> FailoverLimiter:
    limiter = FailoverLimiter(shared, LocalLimiter(policy="closed"))
    limits = Limits(requests_per_minute=10, tokens_per_minute=1000)
    await limiter.configure([Tenant("acme", limits=limits), Tenant("globex", limits=limits)])
    return limiter


async def test_a_grant_is_foreseen_where_half_of_every_limit_stays_free(limiter):
    assert not limiter.likely_to_grant(asking())  # nothing was heard of the limits
    await limiter.reserve(asking(100))
    assert limiter.likely_to_grant(asking(400))
    assert not limiter.likely_to_grant(asking(401))
    for _ in range(4):
        assert limiter.likely_to_grant(asking(0))
        await limiter.reserve(asking(0))
    assert not limiter.likely_to_grant(asking(0))  # five of ten requests


def test_limits_in_shadow_make_no_difference():
    full = Meter(10, 10.0)
    assert not Bucket(full, Meter()).has_headroom(1, 0.5)
    assert Bucket(replace(full, shadow=True), Meter()).has_headroom(1, 0.5)


async def test_one_scope_that_was_never_heard_of_is_enough_to_wait(limiter):
    await limiter.reserve(asking())
    assert limiter.likely_to_grant(asking())
    assert not limiter.likely_to_grant(asking(adapter="pirate"))
    assert not limiter.likely_to_grant(asking(tenant="globex"))


async def test_one_reservation_at_a_time_is_foreseen(limiter, shared):
    await limiter.reserve(asking(1))
    shared.may_answer.clear()
    other = asyncio.create_task(limiter.reserve(asking(1)))
    await asyncio.sleep(0)
    assert not limiter.likely_to_grant(asking(1))
    shared.may_answer.set()
    await other
    assert limiter.likely_to_grant(asking(1))


async def test_who_asks_and_leaves_has_nothing_foreseen_before_the_next_grant(limiter, shared):
    await limiter.reserve(asking(1))
    await limiter.reserve(asking(1, tenant="globex"))
    shared.may_answer.clear()
    other = asyncio.create_task(limiter.reserve(asking(1)))
    await asyncio.sleep(0)
    other.cancel()
    await asyncio.wait([other])
    assert not limiter.likely_to_grant(asking(1))
    assert limiter.likely_to_grant(asking(1, tenant="globex"))  # it is asked for no more
    shared.may_answer.set()
    await limiter.reserve(asking(1))
    assert limiter.likely_to_grant(asking(1))


async def test_a_failure_of_redis_ends_what_was_foreseen(limiter, shared):
    await limiter.reserve(asking(1))
    shared.is_away = True
    with pytest.raises(ApiError):
        await limiter.reserve(asking(1))
    assert not limiter.likely_to_grant(asking(1))


async def test_what_was_heard_of_a_tenant_goes_with_it(limiter):
    await limiter.reserve(asking(1))
    await limiter.reserve(asking(1, tenant="globex"))
    await limiter.drop("acme")
    assert not limiter.likely_to_grant(asking(1))
    assert limiter.likely_to_grant(asking(1, tenant="globex"))


async def test_a_refusal_ends_what_was_foreseen(limiter, shared):
    await limiter.reserve(asking(1))
    await shared.configure([Tenant("acme", limits=Limits(tokens_per_minute=50))])
    assert limiter.likely_to_grant(asking(100))
    with pytest.raises(ApiError):
        await limiter.reserve(asking(100))
    assert not limiter.likely_to_grant(asking(1))
    await limiter.reserve(asking(1))
    assert limiter.likely_to_grant(asking(1))


async def test_nothing_is_foreseen_while_redis_is_away(limiter, shared):
    await limiter.reserve(asking(1))
    shared.available = False
    assert not limiter.likely_to_grant(asking(1))


METERS = st.builds(Meter, limit=st.none() | st.integers(1, 1000), used=st.floats(0, 2000), shadow=st.booleans())
COUNTS = st.builds(CountMeter, limit=st.none() | st.integers(1, 1000), used=st.integers(0, 2000), shadow=st.booleans())


@given(st.builds(Bucket, METERS, METERS, st.just(0), COUNTS, COUNTS), st.integers(0, 1000))
def test_what_has_room_is_admitted_twice_over(bucket, tokens):
    """A bucket that is roomy for a request admits another request of the same size first, and then this one."""
    assume(bucket.has_headroom(tokens, 0.5))
    others = reserve([bucket], tokens, 0)
    assert others.admitted
    assert reserve(others.buckets, tokens, 0).admitted


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


@pytest.fixture
def likely(gateway_app, monkeypatch) -> asyncio.Event:
    """Grants are foreseen, and given when this is set."""
    may_answer = asyncio.Event()
    ask = gateway_app.limiter.reserve

    async def reserve(request):
        await may_answer.wait()
        return await ask(request)

    monkeypatch.setattr(gateway_app.limiter, "likely_to_grant", lambda request: True)
    monkeypatch.setattr(gateway_app.limiter, "reserve", reserve)
    return may_answer


def request(**fields) -> GenerateRequest:
    return make_request(BASE, "Say hello", **fields)


async def answer(gateway_app, wanted, who=None) -> str:
    async with gateway_app.gateway.generate(who or principal(), wanted) as generation:
        return "".join([chunk.text async for chunk in generation])


@pytest.mark.parametrize("n", [1, 3])
async def test_the_engine_is_at_work_while_the_limiter_is_asked(gateway_app, likely, n):
    task = asyncio.create_task(answer(gateway_app, request(n=n, max_tokens=50)))
    await asyncio.sleep(0.01)
    assert len(gateway_app.engine.requests) == n
    assert gateway_app.limiter.reserved == []
    assert not task.done()
    likely.set()
    assert sorted(await task) == sorted("Hello, world!" * n)
    assert len(gateway_app.engine.requests) == n
    await gateway_app.assert_empty()
    assert gateway_app.limiter.rows[0].counts.requests == 1


async def test_batch_work_waits_for_its_grant(gateway_app, likely):
    task = asyncio.create_task(answer(gateway_app, request(lane=Lane.BATCH)))
    await asyncio.sleep(0.01)
    assert gateway_app.engine.requests == []
    likely.set()
    assert await task == "Hello, world!"


@pytest.mark.parametrize("n", [1, 3])
async def test_what_is_refused_after_all_is_aborted_and_no_tenant_pays(gateway_app, likely, n):
    asyncio.get_running_loop().call_later(0.01, likely.set)
    with pytest.raises(ApiError) as caught:
        await answer(gateway_app, request(n=n, max_tokens=240), principal("sk-globex"))
    assert caught.value.fault is Fault.INSUFFICIENT_QUOTA
    assert list(gateway_app.engine.ends.values()) == ["aborted"] * n
    assert gateway_app.limiter.reserved_tokens == 0
    await gateway_app.assert_empty()
    [record] = gateway_app.watcher.records
    assert (record.outcome.status, record.times.submitted, record.used_tokens) == (429, None, 0)


async def test_who_leaves_while_the_limiter_is_asked_leaves_nothing_at_work(gateway_app, likely):
    task = asyncio.create_task(answer(gateway_app, request()))
    await asyncio.sleep(0.01)
    assert gateway_app.engine.open == 1
    task.cancel()
    await asyncio.sleep(0.01)
    assert gateway_app.engine.open == 0
    likely.set()
    with suppress(asyncio.CancelledError):
        await task
    await gateway_app.assert_empty()
    assert gateway_app.watcher.records[0].used_tokens == 0


async def test_an_engine_that_fails_meanwhile_costs_nothing(gateway_app, likely):
    gateway_app.engine.fail_after = 0
    asyncio.get_running_loop().call_later(0.01, likely.set)
    with pytest.raises(ApiError) as caught:
        await answer(gateway_app, request())
    assert caught.value.fault is Fault.ENGINE_UNAVAILABLE
    assert list(gateway_app.limiter.ends.values()) == [[0]]
    await gateway_app.assert_empty()


@pytest.mark.parametrize("foreseen", [True, False])
async def test_an_engine_that_is_lost_before_it_is_asked_costs_nothing(gateway_app, monkeypatch, foreseen):
    def generate(request, session="", handover=None):
        raise EngineUnavailable("lost")

    monkeypatch.setattr(gateway_app.engine, "generate", generate)
    monkeypatch.setattr(gateway_app.limiter, "likely_to_grant", lambda request: foreseen)
    with pytest.raises(ApiError) as caught:
        await answer(gateway_app, request())
    assert caught.value.fault is Fault.ENGINE_UNAVAILABLE
    assert list(gateway_app.limiter.ends.values()) == [[0]]
    await gateway_app.assert_empty()


async def test_who_leaves_before_an_engine_has_the_request_pays_nothing(tmp_path, monkeypatch):
    def generate(request, session="", handover=None):
        raise EngineUnavailable("lost")

    gateway_app = await build_gateway_app(tmp_path, ServiceSettings(engine_wait=60.0))
    monkeypatch.setattr(gateway_app.engine, "generate", generate)
    task = asyncio.create_task(answer(gateway_app, request()))
    while not gateway_app.limiter.reserved:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])
    assert list(gateway_app.limiter.ends.values()) == [[0]]
    assert gateway_app.watcher.records[0].outcome.finish == "cancelled"
    assert gateway_app.limiter.rows == []
    await gateway_app.assert_empty()
