"""The primary that Sentinels name: it is found through the first of them that answers, and followed in a failover."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from patient_valkey import PatientValkey
from valkey_cluster import free_port

from gateway.limiter.base import ReserveRequest
from gateway.limiter.redis import RedisLimiter
from gateway.redis.address import StoreAddress, store_address
from gateway.redis.client import StoreError
from gateway.redis.connect import connect_server

PASSWORD = "s3cret/of the Sentinel"
QUERY = "?sentinel_password=s3cret%2Fof%20the%20Sentinel"
WANTED = ReserveRequest("r", "acme", "k", 1, "pirate")


class Sentinel:
    """A process of the server's binary that watches, as `main`, whichever server it is told to."""

    def __init__(self, binary: str, folder: Path) -> None:
        self.port = free_port()
        config = folder / "sentinel.conf"
        config.write_text(f'port {self.port}\nbind 127.0.0.1\ndir {folder}\nrequirepass "{PASSWORD}"\n')
        self.process = subprocess.Popen([binary, str(config), "--sentinel"], stdout=subprocess.DEVNULL)
        self._client = redis.Redis(port=self.port, password=PASSWORD)

    def name(self, port: int) -> None:
        """Name the server at `port` the primary, as after a failover."""
        self._client.sentinel_remove("main") if self._client.sentinel_masters() else None
        self._client.sentinel_monitor("main", "127.0.0.1", port, 1)

    def __enter__(self) -> Sentinel:
        for _ in range(500):
            try:
                self._client.ping()
                return self
            except redis.ConnectionError:
                time.sleep(0.02)
        pytest.fail("the Sentinel did not start")

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def watched(tmp_path) -> Iterator[tuple[Sentinel, list[PatientValkey]]]:
    """A Sentinel and two servers, of which the first is the primary."""
    with ExitStack() as stack:
        servers = [stack.enter_context(PatientValkey()) for _ in range(2)]
        sentinel = stack.enter_context(Sentinel(str(servers[0]._binary_path), tmp_path))
        sentinel.name(servers[0].port)
        yield sentinel, servers


async def test_the_primary_is_found_and_followed(watched):
    sentinel, servers = watched
    async with connect_server(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/main/2{QUERY}") as client:
        limiter = RedisLimiter(client, timeout=5.0, threshold=1)
        await limiter.settle(await limiter.reserve(WANTED), 1)
        await client.set("key", "kept by the pool")
        with redis.Redis(port=servers[0].port) as old:
            old.replicaof("127.0.0.1", 1)
        await asyncio.to_thread(sentinel.name, servers[1].port)
        await limiter.settle(await limiter.reserve(WANTED), 1)
        await client.set("key", "kept by the pool")
        await limiter.close()
    for server in servers:
        with redis.Redis(port=server.port, db=2) as found:
            assert found.exists("key", "loralane:bucket:{acme}:tenant") == 2


async def test_without_an_answer_of_any_sentinel_redis_is_away(watched):
    sentinel, _ = watched
    for url in ("redis+sentinel://127.0.0.1:1/main", f"redis+sentinel://127.0.0.1:{sentinel.port}/other{QUERY}"):
        async with connect_server(url) as client:
            limiter = RedisLimiter(client, timeout=5.0)
            with pytest.raises(StoreError, match="no Sentinel knows a primary named"):
                await limiter.reserve(WANTED)
            assert await limiter.trouble() == "it gives no answer"
            await limiter.close()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", StoreAddress((("h", 6379),), "redis://h")),
        ("rediss://u:p@h:1,i/3?a=b", StoreAddress((("h", 1), ("i", 6379)), "rediss://u:p@h:1/3?a=b")),
        ("redis://[::1]:5,[::2]", StoreAddress((("::1", 5), ("::2", 6379)), "redis://[::1]:5")),
        (
            "rediss+sentinel://:p@a,b:2/my%20main?x=y",
            StoreAddress((("a", 26379), ("b", 2)), "rediss://:p@a/?x=y", "my main"),
        ),
        ("unix:///a.sock?db=1", StoreAddress((), "unix:///a.sock?db=1")),
    ],
)
def test_addresses(url, address):
    assert store_address(url) == address
