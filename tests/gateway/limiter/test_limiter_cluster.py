"""Limits in a real cluster of three nodes on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import date

import pytest
from audit_walk import walk_audit
from file_fakes import build_files, walk
from redis.asyncio.cluster import RedisCluster
from valkey_cluster import NODES, SLOTS

from gateway.accounts.record import account_store
from gateway.accounts.registry import AccountRegistry
from gateway.core.errors import ApiError
from gateway.core.limits import Limits, Scope
from gateway.core.tenants import Tenant
from gateway.core.usage import Counts, day_of
from gateway.limiter.base import Grant, ReserveRequest
from gateway.limiter.redis import RedisLimiter
from gateway.redis.connect import connect_cluster
from gateway.usage.books import RedisUsageBooks

FAR_AHEAD = date(3000, 1, 1)


@pytest.fixture
async def cluster(cluster_ports) -> AsyncIterator[RedisCluster]:
    """A client of the three as one cluster, empty."""
    async with connect_cluster(f"redis://127.0.0.1:{cluster_ports[0]}") as client:
        await client.flushall(target_nodes=RedisCluster.PRIMARIES)
        yield client


async def test_every_call_works_across_slots(cluster):
    limiter = RedisLimiter(cluster, timeout=10.0)
    names = [f"tenant-{number}" for number in range(12)]
    limits = Limits(100, 1000, 5, 10_000)
    await limiter.configure(Tenant(name, limits=limits, key_limits=limits) for name in names)
    assert len({await cluster.cluster_keyslot(f"{{{name}}}") * NODES // SLOTS for name in names}) == NODES
    for name in names:
        await limiter.set_limits(Scope(name, adapter="pirate"), {"tokens_per_minute": 700})
        grant = await limiter.reserve(ReserveRequest("r", name, "k", 600, "pirate"))
        assert await limiter.renew(grant)
        with pytest.raises(ApiError) as refused:
            await limiter.reserve(ReserveRequest("r", name, "k2", 200, "pirate"))
        assert refused.value.metadata["scope"] == "adapter:pirate"
        assert len(await limiter.usage(name)) == 3
        await limiter.restore_limits(Scope(name))
        await limiter.forget_use(Scope(name, key="k"))
        await limiter.settle(grant, 10)
    assert await limiter.outstanding() == 0
    await limiter.close()


async def test_fifty_at_once_admit_exactly_what_fits(cluster):
    limiters = [RedisLimiter(cluster, timeout=10.0) for _ in range(3)]
    for limiter in limiters:
        await limiter.configure([Tenant("acme", limits=Limits(tokens_per_minute=1000))])
    wanted = ReserveRequest("r", "acme", "k", 300, "pirate")
    answers = await asyncio.gather(*(limiters[i % 3].reserve(wanted) for i in range(50)), return_exceptions=True)
    assert sum(isinstance(answer, Grant) for answer in answers) == 3
    assert sum(isinstance(answer, ApiError) for answer in answers) == 47


async def test_registries_are_kept_in_it_too(cluster):
    registry = AccountRegistry(account_store(cluster), lambda tenants: None)
    await registry.start()
    await registry.create(Tenant("acme"))
    new = await registry.create_key("acme")
    assert registry.authenticate(new.secret).tenant == Tenant("acme")
    await registry.delete("acme")
    assert registry.records == {}
    await registry.close()
    await walk_audit(cluster)


async def test_usage_is_counted_and_read_across_slots(cluster):
    limiter, used = RedisLimiter(cluster, timeout=10.0), Counts(1, 100, 20, 30, 4000)
    names = [f"tenant-{number}" for number in range(12)]
    for name in names:
        grant = await limiter.reserve(ReserveRequest("r", name, "k", 200, "pirate", "batch", lambda: used))
        await limiter.renew(grant)
        await limiter.settle(grant, 130)
        limiter.count(grant)
    await limiter.close()
    rows = [row async for page in RedisUsageBooks(cluster).rows("", day_of(grant.day), FAR_AHEAD) for row in page]
    assert {row.tenant: row.counts for row in rows} == dict.fromkeys(names, used + used)


async def test_files_of_a_tenant_are_in_one_slot(cluster, tmp_path):
    await walk(build_files(cluster, tmp_path))
