"""An engine that several gateways share keeps an adapter for as long as one of them wants it."""

import asyncio

import pytest

from engine.config import EngineConfig
from engine.core.messages.requests import ErrorCode, FinishReason, Request, SamplingParams
from engine.rpc.adapter_refs import Holders
from engine.rpc.client import EngineClient
from gateway.serve.supervisor import EngineSupervisor

pytestmark = pytest.mark.slow


def test_only_the_last_to_let_go_tells_the_engine():
    holders = Holders()
    assert all(holders.hold("a", gateway, holders.now()) for gateway in ("one", "two"))
    assert not holders.let_go("a", "one")
    assert not holders.let_go("a", "one"), "once is as good as twice"
    assert holders.let_go("a", "two")


def test_what_was_dropped_while_it_was_read_is_read_again():
    holders = Holders()
    holders.hold("a", "one", holders.now())
    began = holders.now()
    assert holders.let_go("a", "one")
    assert not holders.hold("a", "two", began)
    assert holders.hold("a", "two", holders.now())
    assert holders.hold("b", "two", began), "another adapter was not dropped"


def test_a_gateway_that_is_gone_wants_nothing():
    holders = Holders()
    for gateway in ("one", "two"):
        holders.hold("a", gateway, holders.now())
    holders.leave("one")
    assert holders.let_go("a", "two")


@pytest.fixture
async def engine(tmp_path):
    config = EngineConfig(model="fake", num_pages=30_000, block_size=4, max_seqs=8, max_model_len=110_000)
    async with EngineSupervisor(config, tmp_path / "engine.sock", ("engine.serve.server", "--fake")) as supervisor:
        yield supervisor.address


async def connected(address):
    client = EngineClient(address)
    await client.start()
    await asyncio.wait_for(client.wait_ready(), 120)
    return client


async def run(client, adapter_hash, tokens=8):
    request = Request(
        f"{id(client)}-{tokens}", (1, 2, 3), SamplingParams(max_tokens=tokens, ignore_eos=True), adapter_hash
    )
    return [event async for events in client.generate(request) for event in events]


async def test_unloading_in_one_gateway_leaves_the_others_adapter_alone(engine):
    first, second = await connected(engine), await connected(engine)
    adapter_hash = (await first.load_adapter("a")).adapter
    assert (await second.load_adapter("a")).adapter == adapter_hash
    running = asyncio.create_task(run(second, adapter_hash, 2000))
    await asyncio.sleep(0.05)
    assert await first.unload_adapter(adapter_hash, 0.0) == 0
    assert (await running)[-1].finish_reason is FinishReason.LENGTH
    await second.unload_adapter(adapter_hash, 0.0)
    [refused] = await run(second, adapter_hash, 4)
    assert refused.refusal.code is ErrorCode.MODEL_NOT_FOUND
    await first.close()
    await second.close()


async def test_a_gateway_that_left_holds_nothing_back(engine):
    first, second = await connected(engine), await connected(engine)
    adapter_hash = (await first.load_adapter("a")).adapter
    await second.load_adapter("a")
    await first.close()
    async with asyncio.timeout(60):
        while True:
            await second.load_adapter("a")
            await second.unload_adapter(adapter_hash, 0.0)
            if (await run(second, adapter_hash, 3))[-1].refusal is not None:
                break
            await asyncio.sleep(0.02)
    await second.close()
