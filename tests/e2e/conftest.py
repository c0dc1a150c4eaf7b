"""A whole gateway with a real engine, a real model, real adapters and a real store, once for all tests here."""

import os
from dataclasses import replace

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
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


@pytest.fixture
def openai_of(server):
    """Clients by key, as callers have them; to be closed by those who open them.

    One that is not, and is garbage together with its connections, closes their sockets first and takes their readers
    off the event loop later, by number: then they are those of somebody else, the server's new connections included.
    """

    def opened(key):
        return AsyncOpenAI(base_url=f"http://127.0.0.1:{server.http_port}/v1", api_key=key, max_retries=0)

    return opened


@pytest_asyncio.fixture(loop_scope="session")
async def client(openai_of):
    async with openai_of("sk-demo-acme") as opened:
        yield opened


@pytest.fixture(scope="session")
def models(server):
    """Base and adapters, as clients name them."""
    return [server.gateway.base_name, *DEMO_ADAPTERS]
