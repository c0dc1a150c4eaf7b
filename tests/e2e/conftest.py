"""A whole gateway with a real engine, a real model, real adapters and a real store, once for all tests here."""

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from gateway.config.lanes import InteractiveLane, LanesConfig
from gateway.config.whole import demo_config
from gateway.serve.launch import Launch
from gateway.serve.single import running
from lab.demo.characters import CHARACTERS


@pytest.fixture(scope="session")
def demo(smollm2):
    """The demo's configuration in fp32, where text does not depend on the batch, on free ports, with fewer answers in
    the lane than an attack of one test asks for."""
    config = demo_config()
    engine = replace(config.engine, dtype="float32", memory_gb=0.5, threads=1, device="cpu")
    http = replace(config.http, port=0, first_token_timeout_s=600.0)
    redis = replace(config.redis, timeout_ms=30_000.0)  # a busy machine is not without one
    lanes = LanesConfig(interactive=InteractiveLane(max_requests=120))
    return replace(config, engine=engine, http=http, grpc=replace(config.grpc, port=0), redis=redis, lanes=lanes)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return the folder of a small random model with a tokenizer, whose tokens are bytes, and a chat template."""
    tests = Path(__file__).parents[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tests / "gateway"))
        patch.syspath_prepend(str(tests / "model"))
        from fakes import tiny_tokenizer
        from tiny_llama import save_llama
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    save_llama(folder, 260, 512, eos_token_id=0)
    tiny_tokenizer()._template.save_pretrained(folder)
    return folder


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(demo, smollm2, tmp_path_factory):
    launch = Launch(demo, smollm2, tmp_path_factory.mktemp("data"))
    async with running(launch) as app:
        yield app


@pytest.fixture(scope="session")
def models(server):
    """Return what clients call the base and the adapters that speak in character: each answers in its own way."""
    return [server.gateway.models.default.name, *CHARACTERS]


@pytest_asyncio.fixture(loop_scope="session")
async def client_of(server):
    """Makes OpenAI's clients by key, and closes them.

    One that is left to the collector loses its sockets first and is closed behind that: then it stops the loop from
    listening to whose connections have the sockets' numbers by now. The server's have, for it is on the same loop.
    """
    async with AsyncExitStack() as stack:

        def make(key):
            client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.http_port}/v1", api_key=key, max_retries=0)
            stack.push_async_exit(client)
            return client

        yield make


@pytest.fixture
def client(client_of):
    return client_of("sk-demo-acme")
