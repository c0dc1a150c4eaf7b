"""Real gateway processes that share one Valkey, and what dies under them."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import gateway_worker
import httpx
import pytest
import redis
from fakes import BASE
from patient_valkey import PatientValkey

pytestmark = pytest.mark.slow

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.gateway.conftest", "gateway_worker"])
Start = Callable[..., list["Gateway"]]


@dataclass
class Gateway:
    process: BaseProcess
    url: str

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        self.process.kill()
        self.process.join()


@pytest.fixture
def server(tmp_path) -> Iterator[PatientValkey]:
    """On a socket that stays the same when it is started again."""
    path = tmp_path / "v.sock"
    server = PatientValkey(port=0, data_dir=tmp_path, unix_socket_path=path, appendonly="yes", appendfsync="always")
    server.start()
    yield server
    if server.is_running():
        server.stop()


@pytest.fixture
def start(server, tmp_path) -> Iterator[Start]:
    """Starts gateways side by side, and ends them."""
    started: list[Gateway] = []

    def begin(options: dict[str, Any]) -> tuple[BaseProcess, Connection]:
        ours, theirs = FORKS.Pipe()
        process = FORKS.Process(target=gateway_worker.run, args=(options, theirs), daemon=True)
        process.start()
        return process, ours

    def build(count: int, **options: Any) -> list[Gateway]:
        folder = tmp_path / "adapters"
        folder.mkdir(exist_ok=True)
        options |= {"redis": f"unix://{server.unix_socket_path}", "folder": str(folder)}
        begun = [begin(options) for _ in range(count)]
        new = [Gateway(process, f"http://127.0.0.1:{port.recv()}") for process, port in begun]
        started.extend(new)
        return new

    yield build
    for gateway in started:
        gateway.kill()


async def ask(client: httpx.AsyncClient, gateway: Gateway, key: str = "sk-acme", tokens: int = 8) -> httpx.Response:
    """Request a completion of `tokens` tokens, including the prompt."""
    body = {"model": BASE, "prompt": "hello", "max_tokens": tokens - 5}
    headers = {"authorization": f"Bearer {key}"}
    return await client.post(f"{gateway.url}/v1/completions", json=body, headers=headers)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_three_gateways_admit_exactly_what_fits(server, start):
    """What fits runs until all is decided, and half a minute must pass before a third request would fit."""
    gateways = start(3, limits={"acme": {"tokens_per_minute": 1000}}, pause=120.0)
    async with httpx.AsyncClient(timeout=120) as client:
        asked = [asyncio.create_task(ask(client, gateways[i % 3], tokens=500)) for i in range(50)]

        async def are_decided() -> bool:
            return (sum(task.done() for task in asked), len(leases(server))) == (48, 2)

        await until(are_decided)
        refused = [task.result() for task in asked if task.done()]
        for task in asked:
            task.cancel()
    assert {answer.status_code for answer in refused} == {429}
    for answer in refused:
        assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
        assert 0 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < 500
        assert 0 < int(answer.headers["retry-after-ms"]) <= 30_000, "the true wait: for 500 of 1,000 tokens at most"


async def test_a_killed_gateways_slots_are_free_within_their_term_and_no_others(server, start):
    limits = {"acme": {"concurrent_requests": 3}}
    dying, living = start(2, limits=limits, pause=120.0, lease_seconds=1.0)
    [visitor] = start(1, limits=limits, lease_seconds=1.0)
    async with httpx.AsyncClient(timeout=60) as client:

        async def hold(gateway: Gateway) -> None:
            """Start an endless request. Try again if the visitor's request holds the slot at that moment."""
            while (await ask(client, gateway)).status_code == 429:
                await asyncio.sleep(0.02)

        held = [asyncio.create_task(hold(gateway)) for gateway in (dying, dying, living)]

        async def full() -> bool:
            return (await ask(client, visitor)).status_code == 429

        async def free() -> bool:
            return not await full()

        await until(full)
        dying.kill()
        await until(free)
        [heir] = start(1, limits=limits, pause=120.0, lease_seconds=1.0)
        held += [asyncio.create_task(hold(heir)) for _ in range(2)]
        await until(full)  # with the living gateway's request, which still counts
        later = max(expiries(server).values()) + 1000

        async def renewed() -> bool:
            return sum(expiry > later for expiry in expiries(server).values()) == 3

        await until(renewed)  # gateways that live renew their leases, also beyond the first term of a second
        await until(full)
        for task in held:
            task.cancel()
            with suppress(asyncio.CancelledError, httpx.TransportError):
                await task


POLICIES = {
    "acme": {"tokens_per_minute": 300},
    "globex": {"requests_per_minute": 1000, "when_redis_is_away": {"requests_per_minute": "closed"}},
    "initech": {"requests_per_minute": 5, "when_redis_is_away": {"requests_per_minute": "open"}},
}


async def test_each_limit_does_what_it_says_while_redis_is_away_and_recovery_needs_no_restart(server, start):
    [gateway] = start(1, limits=POLICIES, replicas=3, lease_seconds=1.0, pause=0.01)
    stop = asyncio.Event()
    seen: list[tuple[str, int, str, str]] = []
    async with httpx.AsyncClient(timeout=60) as client:

        async def load(key: str, model_tokens: int) -> None:
            while not stop.is_set():
                answer = await ask(client, gateway, key, model_tokens)
                code = "" if answer.status_code == 200 else answer.json()["error"]["code"]
                await asyncio.sleep(0.005)
                seen.append((key, answer.status_code, code, answer.headers.get("x-loralane-limiter", "redis")))

        async def has(wanted: tuple[str, int, str, str]) -> None:
            async def found() -> bool:
                return wanted in seen

            await until(found)

        async with asyncio.TaskGroup() as tasks:
            for key in ("sk-acme", "sk-globex", "sk-initech"):
                tasks.create_task(load(key, 30))
            await has(("sk-globex", 200, "", "redis"))
            server.terminate()
            await has(("sk-acme", 200, "", "degraded"))
            await has(("sk-acme", 503, "limiter_unavailable", "degraded"))
            await has(("sk-globex", 503, "limiter_unavailable", "closed"))
            await has(("sk-initech", 200, "", "open"))
            state = (await client.get(f"{gateway.url}/ready")).json()
            assert (state["redis"], state["limiter_modes"]) == (False, ["closed", "degraded", "open"])
            text = (await client.get(f"{gateway.url}/metrics", headers={"authorization": "Bearer sk-admin"})).text
            assert 'loralane_limiter_mode{mode="closed"} 1.0' in text
            server.start()
            seen.clear()
            await has(("sk-globex", 200, "", "redis"))
            await has(("sk-initech", 429, "rate_limit_exceeded", "redis"))
            stop.set()
        assert not [each for each in seen if each[1] == 429 and each[3] != "redis"], "never a 429 for our own fault"
        await until(lambda: nothing_is_owed(server))


async def nothing_is_owed(server: PatientValkey) -> bool:
    return not leases(server)


def expiries(server: PatientValkey) -> dict[bytes, float]:
    """Return when the slots of requests expire, by lease, in milliseconds of the server's clock."""
    with redis.Redis(unix_socket_path=str(server.unix_socket_path)) as books:
        keys = list(books.scan_iter("loralane:running:*"))
        return {lease: expiry for key in keys for lease, expiry in books.zrange(key, 0, -1, withscores=True)}


def leases(server: PatientValkey) -> list[bytes]:
    with redis.Redis(unix_socket_path=str(server.unix_socket_path)) as books:
        return list(books.scan_iter("loralane:lease:*"))
