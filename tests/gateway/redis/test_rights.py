"""The rights that docs/availability.md lists suffice, on a server and in a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from audit_walk import walk_audit
from file_fakes import build_files, walk
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.lock import Lock

from gateway.accounts.last_use import LastUse, RedisLastUse
from gateway.accounts.record import account_store
from gateway.accounts.registry import open_accounts
from gateway.adapters.names import NameLocks
from gateway.cluster.lease import Lease
from gateway.core.limits import Limits, Scope
from gateway.core.tenants import Tenant
from gateway.limiter.base import ReserveRequest
from gateway.limiter.redis import RedisLimiter
from gateway.redis.connect import connect_cluster, connect_server
from gateway.redis.maxmemory import EvictionWatch

DOCUMENT = Path("docs/availability.md")
WANTED = ReserveRequest("r", "acme", "k", 1, "pirate")


@pytest.fixture(autouse=True)
def locks_of_no_other_client(monkeypatch):
    """redis-py keeps a lock's scripts as the first client of the process registers them, which may be another test's,
    of redis-py itself, and loads scripts by SCRIPT."""
    for name in ("lua_release", "lua_extend", "lua_reacquire"):
        monkeypatch.setattr(Lock, name, None)


def rights() -> list[str]:
    """The words of `ACL SETUSER loralane ...` in the document, with a password instead of its placeholder."""
    [line] = re.findall(r"^ACL SETUSER (loralane .*)$", DOCUMENT.read_text(), re.MULTILINE)
    return line.replace(">PASSWORD", ">pw").split()


async def use_everything(client: Redis, folder: Path) -> None:
    limiter = RedisLimiter(client, timeout=10.0)
    await limiter.configure([Tenant("acme", limits=Limits(100))])
    await limiter.set_limits(Scope("acme"), {"requests_per_minute": 9})
    grant = await limiter.reserve(WANTED)
    await limiter.renew(grant)
    await limiter.settle(grant, 1)
    assert await limiter.usage("acme")
    assert await limiter.outstanding() == 0
    assert await limiter.trouble() == ""
    await limiter.drop("acme")
    await limiter.close()
    assert await EvictionWatch(client)._look() == set()
    last_use = LastUse(RedisLastUse(client))
    async with open_accounts(account_store(client), lambda tenants: None, [], last_use=last_use) as accounts:
        await accounts.create(Tenant("acme"))
        new = await accounts.create_key("acme")
        accounts.authenticate(new.secret)
        await last_use.write()
        assert new.account.key_id in await LastUse(RedisLastUse(client)).read([new.account.key_id])
        await accounts.delete("acme")
        assert await last_use.read([new.account.key_id]) == {}
    async with NameLocks(client).locked("poet"):
        pass
    await walk_audit(client)
    lease = Lease(client, "loralane:")
    assert await lease.hold() and await lease.hold()
    await lease.give_up()
    await walk(build_files(client, folder))


async def test_the_rights_that_are_documented_suffice(valkey, valkey_server, tmp_path):
    await valkey.script_flush()
    await valkey.execute_command("ACL", "SETUSER", *rights())
    try:
        async with connect_server(f"redis://loralane:pw@127.0.0.1:{valkey_server.port}") as client:
            await use_everything(client, tmp_path)
    finally:
        await valkey.execute_command("ACL", "DELUSER", "loralane")


async def test_they_suffice_in_a_cluster(cluster_ports, tmp_path):
    async with connect_cluster(f"redis://127.0.0.1:{cluster_ports[0]}") as operator:
        await operator.flushall(target_nodes=RedisCluster.PRIMARIES)
        await operator.script_flush()
        await operator.execute_command("ACL SETUSER", *rights(), target_nodes=RedisCluster.PRIMARIES)
        try:
            async with connect_cluster(f"redis://loralane:pw@127.0.0.1:{cluster_ports[0]}") as client:
                await use_everything(client, tmp_path)
        finally:
            await operator.execute_command("ACL DELUSER", "loralane", target_nodes=RedisCluster.PRIMARIES)
