"""Several gateway processes on one pair of ports: real processes, a real Valkey, a fake engine that takes 5 ms for a
step. One that takes no time for a token would keep both cores busy with streams that only wait."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from engine.config import EngineConfig
from gateway.config.sections import AdminConfig, GrpcConfig, HttpConfig, LimitsConfig, ObservabilityConfig, RedisConfig
from gateway.config.whole import Config, TenantConfig
from gateway.core.limits import Limits
from gateway.core.tenants import Tenant, hash_key
from gateway.serve.addresses import bind_socket, reserve_port
from gateway.serve.fleet import running_fleet
from gateway.serve.launch import Launch, StartError, share_of

PROCESSES = 2
LEASE_SECONDS = 2.0
LEASE_ENDS_WITHIN = 25.0
"""Seconds until the leases of a killed process must have ended. It allows for a busy machine, and is still less than
the default term of 30 seconds."""
LIMITED = Tenant("limited", limits=Limits(tokens_per_day=1000))
"""A tenant with a limit for the day. Tokens of a limit for the minute would come back while a slow machine still sends
requests."""
TENANTS = (Tenant("acme"), Tenant("changed"), Tenant("killed"), LIMITED)
ENDLESS = 100_000
"""Tokens of a request that runs whatever a test does first."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def launch(smollm2, tmp_path_factory):
    config = Config(
        engine=EngineConfig(model="", num_pages=60_000, block_size=4, max_seqs=16, max_model_len=110_000),
        tenants={tenant.name: TenantConfig(tenant, (hash_key(key_of(tenant.name)),)) for tenant in TENANTS},
        limits=LimitsConfig(lease_seconds=LEASE_SECONDS),
        redis=RedisConfig(timeout_ms=30_000.0),  # no gateway here is without it, however slow the machine
        http=HttpConfig(port=0),
        observability=ObservabilityConfig(request_log=False),
        grpc=GrpcConfig(port=0),
        admin=AdminConfig((hash_key(key_of("admin")),)),
        gateways=PROCESSES,
    )
    return Launch(config, smollm2, tmp_path_factory.mktemp("data"), ("tests.engine.poisonous_engine", "--fake"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack():
    """What stops the fleet: the last test that uses it, or the end of the module."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(launch, stack):
    return await stack.enter_async_context(running_fleet(launch))


def key_of(tenant):
    return f"sk-{tenant}-0123456789"


def client(fleet, tenant="acme", **options):
    """Every request on a connection of its own, which the kernel gives to any of the processes."""
    limits = httpx.Limits(max_keepalive_connections=0)
    headers = {"authorization": f"Bearer {key_of(tenant)}", "connection": "close"}
    url = f"http://127.0.0.1:{fleet.http_port}"
    return httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=60, **options)


def completion(tokens, **fields):
    """Return a request for exactly `tokens` tokens. If it ended sooner, its unused tokens would be refunded."""
    body = {"model": "smollm2-135m-instruct", "prompt": list(range(1, 101)), "max_tokens": tokens, "ignore_eos": True}
    return body | fields


async def statuses(http, count, body):
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(count)))
    return Counter(answer.status_code for answer in answers)


async def until(condition, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


async def running_of(http, tenant):
    usage = (await http.get("/admin/v1/limits/usage", params={"tenant": tenant})).json()["usage"]
    own = [scope for scope in usage if not scope["key"] and not scope["adapter"]]
    return sum(limit["used"] for scope in own for limit in scope["limits"] if limit["name"] == "concurrent_requests")


async def counted(http, name):
    text = (await http.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name)


async def has_counted(http, requests):
    return await counted(http, "loralane_requests_total") >= requests


async def test_connections_are_dealt_out_and_counted_together(fleet):
    """Whichever process is asked, it tells what all have done."""
    pids = {member.pid for member in fleet.members}
    assert len(pids) == PROCESSES
    async with AsyncExitStack() as stack:
        for _ in range(60):
            _, writer = await asyncio.open_connection("127.0.0.1", fleet.http_port)
            stack.enter_context(closing(writer))
        await until(lambda: all_have_connections(pids, fleet.http_port))
    async with client(fleet) as http, client(fleet, "admin") as operator:
        before = await counted(operator, "loralane_requests_total")
        assert await statuses(http, 30, completion(2)) == {200: 30}
        await until(lambda: has_counted(operator, before + 30))  # an answer goes out before it is counted
        for _ in range(10):
            assert await counted(operator, "loralane_requests_total") == before + 30


async def test_gateways_carry_no_tensors(fleet):
    """A tokenizer library brings torch along unless it is kept out."""
    libraries = {
        Path(found.path).name for member in fleet.members for found in psutil.Process(member.pid).memory_maps()
    }
    assert not [name for name in libraries if name.startswith("libtorch")]


async def all_have_connections(pids, port):
    return all(
        any(
            link.laddr.port == port and link.status == psutil.CONN_ESTABLISHED
            for link in psutil.Process(pid).net_connections()
        )
        for pid in pids
    )


async def test_fifty_at_once_share_one_limit(fleet):
    async with client(fleet, "limited") as http:
        assert await statuses(http, 50, completion(200)) == {200: 3, 429: 47}


async def test_a_changed_limit_binds_in_all_of_them_at_once(fleet):
    async with client(fleet, "changed") as http, client(fleet, "admin") as admin:
        assert await statuses(http, 20, completion(1)) == {200: 20}
        change = {"tenant": "changed", "tokens_per_day": 25 * 101}
        assert (await admin.patch("/admin/v1/limits", json=change)).status_code == 200
        assert (await admin.post("/admin/v1/limits/reset", json={"tenant": "changed", "used": True})).status_code == 200
        assert (await admin.patch("/admin/v1/limits", json=change)).status_code == 200
        assert await statuses(http, 40, completion(1)) == {200: 25, 429: 15}


async def test_request_ids_are_unique(fleet):
    async with client(fleet) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=completion(1)) for _ in range(40)))
    assert len({answer.json()["id"] for answer in answers}) == 40
    assert len({answer.headers["x-request-id"] for answer in answers}) == 40


async def test_killing_one_loses_only_its_own_requests(fleet):
    """The others go on; its leases end within their term; another takes its place."""
    async with client(fleet, "killed") as http, client(fleet, "admin") as admin:
        ports = {}
        streams = [asyncio.create_task(read_until_lost(http, ports)) for _ in range(12)]
        await until(lambda: is_running(admin, "killed", 12))
        await until(lambda: are_open(ports, 12))
        victim = max(fleet.members, key=lambda member: len(ports_at(member.pid)))
        pid, lost = victim.pid, ports_at(victim.pid) & ports.keys()
        os.kill(pid, signal.SIGKILL)
        own = {ports[port] for port in lost}
        await asyncio.wait(own, timeout=60)
        assert 0 < len(own) < 12, "of two processes the busier has some of twelve connections"
        await until(lambda: is_running(admin, "killed", 12 - len(own)), LEASE_ENDS_WITHIN)
        assert {stream for stream in streams if stream.done()} == own
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await until(lambda: is_running(admin, "killed", 0))
        await asyncio.wait_for(victim.serving.wait(), 60)
        assert victim.restarts == 1 and victim.pid != pid
        await until(lambda: all_answer(fleet))


def ports_at(pid):
    """Return the ports of the clients that are connected to a process."""
    return {link.raddr.port for link in psutil.Process(pid).net_connections() if link.status == psutil.CONN_ESTABLISHED}


async def read_until_lost(http, ports):
    """Note in `ports` which task has which port. A slow reader leaves the processor to the others."""
    async with http.stream("POST", "/v1/completions", json=completion(ENDLESS, stream=True)) as answer:
        ports[answer.extensions["network_stream"].get_extra_info("client_addr")[1]] = asyncio.current_task()
        async for _ in answer.aiter_bytes():
            await asyncio.sleep(0.05)


async def are_open(ports, count):
    return len(ports) == count


async def is_running(admin, tenant, count):
    try:
        return await running_of(admin, tenant) == count
    except httpx.ReadError:
        return False  # the connection was one to the process that has just been killed


async def all_answer(fleet):
    async with client(fleet) as http:
        return (await http.get("/ready")).status_code == 200


async def test_stopping_lets_requests_end_and_frees_the_ports(fleet, stack):
    async with (
        client(fleet) as http,
        http.stream("POST", "/v1/completions", json=completion(600, stream=True)) as answer,
    ):
        pieces = answer.aiter_text()
        text = await anext(pieces)
        assert "[DONE]" not in text
        stopping = asyncio.create_task(stack.pop_all().aclose())
        text += "".join([piece async for piece in pieces])
    assert text.rstrip().endswith("data: [DONE]")
    await stopping
    assert all(member.pid is None for member in fleet.members)
    for port in (fleet.http_port, fleet.grpc_port):
        bind_socket("127.0.0.1", port).close()


async def test_a_fleet_that_cannot_start_says_so(launch, tmp_path):
    broken = replace(launch, data_dir=tmp_path, model_dir=tmp_path / "nowhere")
    with pytest.raises(StartError, match="did not start"):
        async with running_fleet(broken):
            pass


async def test_a_port_that_another_process_listens_on_is_not_shared():
    with bind_socket("127.0.0.1", 0, shared=True) as other:
        other.listen()
        with pytest.raises(StartError, match="use another port"), reserve_port("127.0.0.1", other.getsockname()[1]):
            pass


async def test_what_is_bounded_for_the_whole_is_shared_out():
    whole = Config(limits=LimitsConfig(replicas=2))
    part = share_of(whole, 3)
    assert part.limits.replicas == 6
    assert part.lanes.interactive.max_requests == 334
    assert part.lanes.batch.max_requests == 3334
    assert part.lanes.batch.ttft_s == whole.lanes.batch.ttft_s
