"""Engines of two base models on a Ray cluster of three pretended nodes, in fp32: a killed engine, a killed node and a
drained engine interrupt no answer, and change no token of it."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import httpx
import psutil
import pytest

from engine.rpc.stream import EngineUnavailable
from engine.rpc.target import EngineTls
from gateway.config.cluster import ClusterConfig, RayConfig
from gateway.config.models import EnginesConfig
from gateway.serve.launch import ENGINE, StartError
from gateway.serve.single import running
from tests.gateway.certificates import Authority
from tests.gateway.cluster.ray_cluster import pretended_cluster
from tests.gateway.cluster.tiny_models import tiny_model
from tests.gateway.serve.test_many_engines import ADAPTERS, ADMIN_KEY, KEY, MODELS, STREAMS, TOKENS, launch, read

__all__ = ["launch"]
pytestmark = pytest.mark.slow
NAME = "engine.loralane.test"
PATIENCE_SECONDS = 240.0
"""For engines that start again on a busy machine: for 20 s, no engine of a model may be left."""


@pytest.fixture
def on_ray(launch, tmp_path):
    """Return a function that makes the launch for a cluster at an address, with engines on Ray and none beside it."""
    authority = Authority.at(tmp_path / "ca")
    issued = authority.issue("engine", NAME)
    tls = EngineTls(authority.file, issued.cert, issued.key, NAME)
    tiny = {name: tiny_model(tmp_path / "tiny", name, ADAPTERS, seed=seed) for seed, name in enumerate(MODELS)}

    def launched(address):
        models = {name: replace(settings, engines=EnginesConfig(tls=tls)) for name, settings in tiny.items()}
        ray = ClusterConfig(RayConfig(address, min=2, max=2, resources={"CPU": 1}))
        patient = replace(launch.config.http, engine_wait_s=PATIENCE_SECONDS, first_token_timeout_s=PATIENCE_SECONDS)
        config = replace(launch.config, models=models, cluster=ray, http=patient)
        return replace(launch, config=config, engine=ENGINE)

    return launched


async def until(condition, seconds=120):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def engine_process(address):
    """Return the engine process that listens at an address on this machine."""
    port = address.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "engine.serve.server" in line and any(word.endswith(f":{port}") for word in line):
            return process
    raise AssertionError(f"no engine listens at {address}")


@pytest.mark.nightly
async def test_streams_outlive_an_engine_a_node_and_a_drained_engine(on_ray):
    with pretended_cluster((2, 2, 2)) as cluster:
        async with running(on_ray(cluster.address)) as app:
            pools = {model.name: model.engine for model in app.gateway.models}
            await asyncio.gather(*(pool.wait_serving(2) for pool in pools.values()))
            assert not app.engines.supervisors
            headers, url = {"authorization": f"Bearer {KEY}"}, f"http://127.0.0.1:{app.http_port}"
            limits = httpx.Limits(max_connections=STREAMS)
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=240, limits=limits) as http:
                expected = {number: await read(http, number) for number in range(0, STREAMS, 10)}
                assert len({text for text, _ in expected.values()}) == len(expected)  # adapters and seeds decide them
                streams = [asyncio.create_task(read(http, number)) for number in range(STREAMS)]
                await until(
                    lambda: sum(record.work.completion_tokens for record in app.gateway.live.values()) > STREAMS
                )
                one, two = (pools[name] for name in MODELS)
                engine_process(one.overviews()[0].address).kill()
                await two.drain("ray-1", True)
                kill_node_of(cluster, engine_process(one.overviews()[1].address))
                answers = await asyncio.gather(*streams)
                await end_draining(two, "ray-1")
                assert await used_tokens(http) == TOKENS * (len(expected) + STREAMS)
                # Ray starts what the node ran on another node, and the gateway finds it there.
                await asyncio.gather(*(asyncio.wait_for(pool.wait_serving(2), 120) for pool in pools.values()))
            assert [tokens for _, tokens in answers] == [TOKENS] * STREAMS
            assert {number: answers[number] for number in expected} == expected
            assert not app.gateway.live
            addresses = [engine.address for pool in pools.values() for engine in pool.overviews()]
            engines = [engine_process(address) for address in addresses]
        await until(lambda: not any(engine.is_running() for engine in engines))


async def end_draining(pool, name, seconds=120):
    """End draining an engine that the killed node may have had. While Ray starts it again, the pool does not list it,
    and then lists it before the connection to it is there."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                return await pool.drain(name, False)
            except (KeyError, EngineUnavailable):
                await asyncio.sleep(0.1)


async def used_tokens(http):
    """Return the completion tokens that the ledger holds, once all requests are in it."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with asyncio.timeout(60):
        while True:
            total = (await http.get("/admin/v1/usage", headers=headers)).json()["total"]
            if total["requests"] == STREAMS + STREAMS // 10:
                return total["completion_tokens"]
            await asyncio.sleep(0.1)


def kill_node_of(cluster, engine):
    """Kill the pretended node on which an engine runs, with all of its processes, as a power failure would."""
    [worker] = [process for process in engine.parents() if "EngineHost" in " ".join(process.cmdline())]
    raylet = worker.parent()
    node = next(node for node in cluster.worker_nodes if raylet_of(node) == raylet.pid)
    for process in [*raylet.children(recursive=True), raylet]:
        os.kill(process.pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


def raylet_of(node):
    return node.all_processes["raylet"][0].process.pid


async def test_a_cluster_out_of_reach_is_said(on_ray):
    with pytest.raises(StartError, match=r"cluster\.ray: .*127\.0\.0\.1:9"):
        async with running(on_ray("127.0.0.1:9")):
            pass
