"""A Redis that may evict keys is warned of, in the log and in /ready."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from structlog.testing import capture_logs

from gateway.redis.connect import connect_cluster
from gateway.redis.maxmemory import EvictionWatch


@pytest.fixture
async def limited(valkey: Redis) -> AsyncIterator[Redis]:
    """A server with a limit of memory, as every managed Redis has."""
    await valkey.config_set("maxmemory", "1gb")
    yield valkey
    await valkey.config_set("maxmemory", "0")
    await valkey.config_set("maxmemory-policy", "noeviction")


async def test_a_policy_that_evicts_is_warned_of_once(limited):
    await limited.config_set("maxmemory-policy", "volatile-lru")
    watch = EvictionWatch(limited)
    with capture_logs() as logs:
        warnings = [await watch.warning() for _ in range(3)]
    assert set(warnings) == {
        "it may evict limits, usage and keys of tenants (maxmemory-policy volatile-lru); set noeviction"
    }
    assert [(entry["event"], entry["policy"]) for entry in logs] == [("redis_may_evict", "volatile-lru")]


@pytest.mark.parametrize(("name", "value"), [("maxmemory-policy", "noeviction"), ("maxmemory", "0")])
async def test_a_server_that_evicts_nothing_is_not(limited, name, value):
    await limited.config_set("maxmemory-policy", "allkeys-lru")
    await limited.config_set(name, value)
    assert await EvictionWatch(limited).warning() == ""


async def test_a_server_that_refuses_info_is_asked_once_a_minute(limited):
    await limited.execute_command("ACL", "SETUSER", "default", "-info")
    try:
        watch = EvictionWatch(limited)
        assert await watch.warning() == ""
    finally:
        await limited.execute_command("ACL", "SETUSER", "default", "+info")
    await limited.config_set("maxmemory-policy", "allkeys-lru")
    assert await watch.warning() == ""


@pytest.mark.parametrize("told", [{}, {"used_memory": 1}, {"maxmemory": 5}])
async def test_a_server_that_does_not_tell_its_policy_is_not(limited, monkeypatch, told):
    async def info(section: str) -> dict[str, int]:
        return told

    monkeypatch.setattr(limited, "info", info)
    assert await EvictionWatch(limited).warning() == ""


async def test_one_primary_of_a_cluster_that_evicts_is_warned_of(cluster_ports):
    async with connect_cluster(f"redis://127.0.0.1:{cluster_ports[0]}") as client:
        one = client.get_primaries()[-1]
        await client.config_set("maxmemory", "1gb", target_nodes=one)
        await client.config_set("maxmemory-policy", "allkeys-lfu", target_nodes=one)
        try:
            assert "allkeys-lfu" in await EvictionWatch(client).warning()
        finally:
            await client.config_set("maxmemory", "0", target_nodes=RedisCluster.PRIMARIES)
            await client.config_set("maxmemory-policy", "noeviction", target_nodes=RedisCluster.PRIMARIES)
