"""States in which Redis answers with errors: connections leave a demoted server, and the mode is true meanwhile."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

import pytest
from msgspec.structs import replace
from patient_valkey import PatientValkey
from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, ClusterDownError, RedisClusterException, ResponseError
from structlog.testing import capture_logs

from gateway.accounts.record import account_store
from gateway.accounts.registry import AccountRegistry
from gateway.core.limits import Limits
from gateway.core.tenants import Tenant
from gateway.core.usage import Counts
from gateway.limiter.base import ReserveRequest
from gateway.limiter.failover import FailoverLimiter
from gateway.limiter.local import LocalLimiter
from gateway.limiter.redis import RedisLimiter
from gateway.redis.connect import connect_server
from gateway.redis.states import answer_of

ACME = Tenant("acme", limits=Limits(tokens_per_minute=1000))
NOWHERE = ("127.0.0.1", 1)
"""A primary that a demoted server cannot reach."""
STATES = {
    "OOM": (("CONFIG", "SET", "maxmemory", 1), ("CONFIG", "SET", "maxmemory", 0)),
    "READONLY": (("REPLICAOF", *NOWHERE), ("REPLICAOF", "NO", "ONE")),
    "MASTERDOWN": (
        ("CONFIG", "SET", "replica-serve-stale-data", "no"),
        ("REPLICAOF", *NOWHERE),
        ("REPLICAOF", "NO", "ONE"),
        ("CONFIG", "SET", "replica-serve-stale-data", "yes"),
    ),
    "NOREPLICAS": (("CONFIG", "SET", "min-replicas-to-write", 1), ("CONFIG", "SET", "min-replicas-to-write", 0)),
    "NOPERM": (("ACL", "SETUSER", "default", "-zadd"), ("ACL", "SETUSER", "default", "+zadd")),
}
"""By the code of the errors: the commands that bring a server into the state, and as many that bring it out."""


def asking() -> ReserveRequest:
    return ReserveRequest("r", "acme", "k1", 1, "pirate")


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[list[PatientValkey]]:
    """Two servers that know nothing of each other."""
    folders = [tmp_path_factory.mktemp("valkey") for _ in range(2)]
    pair = [PatientValkey(port=0, data_dir=folder, unix_socket_path=folder / "v.sock") for folder in folders]
    for server in pair:
        server.start()
    yield pair
    for server in pair:
        server.stop()


@pytest.fixture
async def clients(servers) -> AsyncIterator[list[Redis]]:
    """Clients of both servers, empty."""
    pair = [Redis(unix_socket_path=str(server.unix_socket_path)) for server in servers]
    for client in pair:
        await client.flushall()
    yield pair
    for client in pair:
        await client.replicaof("NO", "ONE")
        await client.aclose()


@pytest.fixture
def name(servers, tmp_path) -> Path:
    """A path that leads to the first server, as the name of a primary does before a failover."""
    path = tmp_path / "name.sock"
    lead_to(servers[0], path)
    return path


async def fail_over(clients: list[Redis], servers: list[PatientValkey], name: Path) -> None:
    """Demote the first server, which leaves its connections open, and let the name lead to the second."""
    await clients[0].replicaof(*NOWHERE)
    await asyncio.to_thread(lead_to, servers[1], name)


def lead_to(server: PatientValkey, name: Path) -> None:
    name.unlink(missing_ok=True)
    name.symlink_to(server.unix_socket_path)


async def test_calls_over_open_connections_follow_a_failover(servers, clients, name):
    async with connect_server(f"unix://{name}") as client, limiting(client) as limiter, following(client) as registry:
        before = await limiter.reserve(asking())
        await fail_over(clients, servers, name)
        grants = await asyncio.gather(*(limiter.reserve(asking()) for _ in range(20)))
        for grant in [before, *grants]:
            await limiter.settle(grant, 1)
        await registry.create(ACME)
        assert limiter.available and await limiter.trouble() == ""
    assert await clients[1].hget("loralane:bucket:{acme}:tenant", "today") == b"20"
    assert await clients[1].hkeys("loralane:accounts:{all}:records") == [b"tenant/acme"]


async def test_usage_that_a_demoted_server_refused_is_counted_by_the_new_primary(servers, clients, name):
    """Which knows nothing of the reservation: it was made in the last moment before the failover."""
    async with connect_server(f"unix://{name}") as client, limiting(client) as limiter:
        grant = await limiter.reserve(replace(asking(), used=lambda: Counts(1, 10, 0, 20)))
        await fail_over(clients, servers, name)
        await limiter.settle(grant, 30)
    [day] = await clients[1].keys("loralane:usage:*")
    assert len(await clients[1].hvals(day)) == 1


@asynccontextmanager
async def limiting(client: Redis) -> AsyncIterator[RedisLimiter]:
    limiter = RedisLimiter(client, timeout=5.0, threshold=2, cooldown=0.0)
    yield limiter
    await limiter.close()


@asynccontextmanager
async def following(client: Redis) -> AsyncIterator[AccountRegistry]:
    registry = AccountRegistry(account_store(client), lambda tenants: None)
    await registry.start()
    try:
        yield registry
    finally:
        await registry.close()


async def follow(client: Redis, code: str) -> None:
    """Bring the server into a state and out of it. Meanwhile, though reads and pings succeed, the limiter says in which
    state the server is, and that it does without it; it logs each change once."""
    commands = STATES[code]
    half = len(commands) // 2
    options = client.connection_pool.connection_kwargs
    async with limiting(client) as shared, Redis(unix_socket_path=options["path"]) as operator:
        limiter = FailoverLimiter(shared, LocalLimiter(1, policy="degraded"))
        await limiter.configure([ACME])
        with capture_logs() as logs:
            for command in commands[:half]:
                await operator.execute_command(*command)
            for _ in range(8):
                assert (await limiter.reserve(asking())).source == "local"
                assert await limiter.trouble()
                await limiter.entries("acme")
                assert limiter.mode == "degraded"
            assert code in await limiter.trouble() or code == "NOPERM"
            for command in commands[half:]:
                await operator.execute_command(*command)
            assert await limiter.trouble() == ""
            assert (limiter.mode, (await limiter.reserve(asking())).source) == ("redis", "redis")
    assert [entry["mode"] for entry in logs if entry["event"] == "limiter_mode_changed"] == ["degraded", "redis"]


@pytest.mark.parametrize("code", STATES)
async def test_the_mode_is_true_while_errors_last(servers, clients, code):
    async with connect_server(f"unix://{servers[0].unix_socket_path}") as client:
        await follow(client, code)


def test_the_probe_calls_whatever_the_limiter_calls():
    def commands(package: str) -> set[str]:
        scripts = [file.read_text() for file in resources.files(package).iterdir() if file.name.endswith(".lua")]
        return set(re.findall(r"redis\.p?call\('(\w+)'", "".join(scripts)))

    assert commands("gateway.limiter") <= commands("gateway.redis")


FRAMES = " (call to f_1): @user_script:3: @user_script: 3:"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ResponseError("MISCONF No snapshot"), "MISCONF No snapshot"),
        (ResponseError("You can't write", status_code="READONLY"), "READONLY You can't write"),
        (ResponseError(f"Error running script{FRAMES} -OOM not allowed", status_code="ERR"), "OOM not allowed"),
        (ClusterDownError("Hash slot not served", status_code="CLUSTERDOWN"), "CLUSTERDOWN Hash slot not served"),
        (RedisClusterException("All slots are not covered ..."), "CLUSTERDOWN no node serves some of the slots"),
        (BusyLoadingError("Redis is loading", status_code="LOADING"), "LOADING Redis is loading"),
        (RedisClusterException("no reachable node: 10.0.0.1:6379"), ""),
        (OSError("no route"), ""),
    ],
)
def test_what_redis_answered_is_told_in_its_words(error, said):
    assert answer_of(error) == said
