"""The drain of one gateway process, over ports that are opened here and an engine that a test holds back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
from fakes import BASE, GatewayApp, build_gateway_app

from gateway.config.sections import AdminConfig, GrpcConfig, HttpConfig
from gateway.config.whole import demo_config
from gateway.core.errors import ApiError
from gateway.core.lifecycle import Lifecycle
from gateway.serve import departure, stopping
from gateway.serve.addresses import reserve_port
from gateway.serve.endpoints import endpoint_servers, listening
from gateway.serve.launch import StartError
from gateway.serve.stopping import Stop

COMPLETION = {"model": BASE, "prompt": "hello", "max_tokens": 3}
HEADERS = {"authorization": "Bearer sk-acme"}


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


@pytest.fixture
def stop(monkeypatch) -> Stop:
    monkeypatch.setattr(departure, "LAG_SECONDS", 0.2)
    return Stop(60.0)


def servers_of(gateway_app, *, shared=False, **admin):
    config = replace(demo_config(), http=HttpConfig(port=0), grpc=GrpcConfig(port=0), admin=AdminConfig(**admin))
    return endpoint_servers(gateway_app.services, config, shared=shared)


async def hold_a_request(gateway_app, client, url):
    """Send a request whose tokens come when `gateway_app.engine.admit` is set, and wait until the engine has it."""
    gateway_app.engine.admit = asyncio.Event()
    asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=COMPLETION))
    async with asyncio.timeout(30):
        while not gateway_app.engine.open:
            await asyncio.sleep(0.01)
    return asking


async def test_a_stop_waits_for_the_last_request_behind_open_ports(gateway_app, stop):
    async with httpx.AsyncClient(headers=HEADERS, timeout=60) as client:
        leaving = asyncio.Event()

        async def serve():
            async with listening(servers_of(gateway_app), stop, shared=False) as ports:
                told.set_result(ports[0])
                await leaving.wait()

        told = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve())
        url = f"http://127.0.0.1:{(await told).http}"
        asking = await hold_a_request(gateway_app, client, url)
        stop.terminate()
        leaving.set()
        async with asyncio.timeout(30):
            while not gateway_app.gateway.lifecycle.refuses:
                await asyncio.sleep(0.01)
        assert (await client.get(f"{url}/ready")).json()["reason"] == "draining"
        assert (await client.post(f"{url}/v1/completions", json=COMPLETION)).status_code == 503
        assert not serving.done()
        gateway_app.engine.admit.set()
        assert (await asking).status_code == 200
        async with asyncio.timeout(30):
            await serving
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/health")
    await gateway_app.assert_empty()


@pytest.mark.parametrize("how", ["the time is over", "a second signal"])
async def test_what_does_not_end_in_time_gets_an_error(gateway_app, stop, how, monkeypatch):
    monkeypatch.setattr(
        "gateway.serve.stopping.threading.Timer", lambda *_: type("", (), {"start": lambda self: None})()
    )
    if how == "the time is over":
        stop.drain_seconds = 0.5
    async with httpx.AsyncClient(headers=HEADERS, timeout=60) as client:
        async with asyncio.timeout(30), listening(servers_of(gateway_app), stop, shared=False) as ports:
            asking = await hold_a_request(gateway_app, client, f"http://127.0.0.1:{ports[0].http}")
            stop.terminate()
            if how == "a second signal":
                asyncio.get_running_loop().call_later(0.1, stop.terminate)
        answer = await asking
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the gateway is stopping; try again")
    await gateway_app.assert_empty()


async def test_an_idle_gateway_still_serves_who_has_not_heard_that_it_stops(gateway_app, stop):
    loop, ended = asyncio.get_running_loop(), []
    async with httpx.AsyncClient(headers=HEADERS, timeout=60) as client:
        async with listening(servers_of(gateway_app), stop, shared=False) as ports:
            stop.terminate()
            url, begun = f"http://127.0.0.1:{ports[0].http}", loop.time()

            async def come_late():
                ended.append(await client.post(f"{url}/v1/completions", json=COMPLETION))

            late = asyncio.create_task(come_late())
        await late
    assert loop.time() - begun >= 0.2
    assert [answer.status_code for answer in ended] == [200]
    await gateway_app.assert_empty()


async def test_a_program_that_leaves_its_gateway_does_not_wait(gateway_app, stop, monkeypatch):
    monkeypatch.setattr(departure, "LAG_SECONDS", 600.0)
    async with asyncio.timeout(30), listening(servers_of(gateway_app), stop, shared=False):
        pass


@pytest.mark.parametrize("ends", [False, True])
async def test_an_administrator_drains_a_gateway_and_decides_whether_it_ends(gateway_app, stop, ends):
    async with listening(servers_of(gateway_app), stop, shared=False) as ports:
        directory = gateway_app.services.gateways
        assert directory.address == f"http://127.0.0.1:{ports[0].http}"
        await directory.drain(directory.own.id, stop=ends)
        async with asyncio.timeout(30):
            while not gateway_app.gateway.lifecycle.refuses:
                await asyncio.sleep(0.01)
        async with httpx.AsyncClient(headers=HEADERS, timeout=60) as client:
            url = f"http://127.0.0.1:{ports[0].http}"
            assert (await client.post(f"{url}/v1/completions", json=COMPLETION)).status_code == 503
        await asyncio.sleep(0)
        assert stop.asked.is_set() is ends


async def status(port, path="/ready"):
    """Status of a new connection's answer; 0 means that none is accepted."""
    async with httpx.AsyncClient(timeout=60) as client:
        try:
            return (await client.get(f"http://127.0.0.1:{port}{path}")).status_code
        except httpx.ConnectError:
            return 0


async def refused(*ports):
    async with asyncio.timeout(30):
        while any([await status(port) for port in ports]):
            await asyncio.sleep(0.01)


async def test_a_process_that_is_drained_alone_leaves_shared_ports_once_another_serves_there(
    gateway_app, stop, monkeypatch
):
    monkeypatch.setattr(departure, "LOOK_SECONDS", 0.01)
    peers = asyncio.Event()

    async def has_peer():
        return peers.is_set()

    gateway_app.services.gateways.has_peer = has_peer
    servers = servers_of(gateway_app, shared=True, port=0, grpc_port=0)
    async with listening(servers, stop, shared=True) as (public, admin):
        gateway_app.gateway.lifecycle.drain(alone=True)
        async with asyncio.timeout(30):
            while not gateway_app.gateway.lifecycle.refuses:
                await asyncio.sleep(0.01)
        assert (await status(public.http), await status(admin.http)) == (503, 503), "it is the last one"
        peers.set()
        await refused(public.http)
        assert await status(admin.http) == 503


async def reserved(*ports):
    """Wait until another process could take the ports."""
    async with asyncio.timeout(30):
        for port in ports:
            while not is_free(port):
                await asyncio.sleep(0.01)


def is_free(port):
    try:
        with reserve_port("127.0.0.1", port):
            return True
    except StartError:
        return False


async def test_a_process_whose_parent_has_died_leaves_all_ports_at_once(gateway_app, stop, monkeypatch):
    monkeypatch.setattr(stopping, "ORPHAN_SECONDS", 60.0)
    ended = asyncio.Event()

    async def serve():
        async with listening(servers_of(gateway_app, shared=True, port=0, grpc_port=0), stop, shared=True) as ports:
            told.set_result(ports)
            await ended.wait()
            stop.orphan()

    told = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve())
    public, admin = await told
    async with httpx.AsyncClient(headers=HEADERS, timeout=60) as client:
        asking = await hold_a_request(gateway_app, client, f"http://127.0.0.1:{public.http}")
        ended.set()
        await reserved(public.http, public.grpc, admin.http, admin.grpc)
        assert not serving.done(), "what runs may end"
        gateway_app.engine.admit.set()
        assert (await asking).status_code == 200
    async with asyncio.timeout(30):
        await serving
    await gateway_app.assert_empty()


async def test_administration_goes_on_beside_a_gateway_that_drains(gateway_app, stop):
    servers = servers_of(gateway_app, port=0, grpc_port=0)
    async with listening(servers, stop, shared=False) as (_, admin):
        gateway_app.gateway.lifecycle.drain(alone=True)
        async with asyncio.timeout(30):
            while not gateway_app.gateway.lifecycle.refuses:
                await asyncio.sleep(0.01)
        async with httpx.AsyncClient(headers={"authorization": "Bearer sk-admin"}, timeout=60) as client:
            assert (await client.get(f"http://127.0.0.1:{admin.http}/admin/v1/lanes")).status_code == 200


def test_nothing_is_refused_before_the_lag_is_over():
    life = Lifecycle()
    life.drain()
    life.check()
    life.refuse()
    with pytest.raises(ApiError, match="draining"):
        life.check()
