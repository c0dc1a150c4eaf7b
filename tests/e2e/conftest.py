"""A whole gateway with a real engine, a real model, real adapters and a real store, once for all tests here."""

import os
from dataclasses import replace

import pytest
import pytest_asyncio
from rich.console import Console

from engine.demo import DEMO_ADAPTERS
from gateway.app import running
from gateway.config import demo_config
from gateway.launch import Launch


@pytest.fixture(scope="session")
def demo(smollm2):
    """The demo's configuration in fp32, where text does not depend on the batch, on free ports."""
    config = demo_config()
    threads = min(2, os.cpu_count() or 1)
    engine = replace(config.engine, dtype="float32", memory_gb=0.5, threads=threads, device="cpu")
    return replace(config, engine=engine, http=replace(config.http, port=0), grpc=replace(config.grpc, port=0))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(demo, smollm2, tmp_path_factory):
    launch = Launch(demo, smollm2, tmp_path_factory.mktemp("data"))
    async with running(launch, Console(stderr=True)) as app:
        yield app


@pytest.fixture(scope="session")
def models(server):
    """Base and adapters, as clients name them."""
    return [server.gateway.base_name, *DEMO_ADAPTERS]
