"""Live requests and lanes over the engine's wire: one gateway sees and stops what another one carries."""

import asyncio
from contextlib import aclosing

import grpc
import pytest

from engine.config import EngineConfig
from engine.core.config import BATCH_GOALS, INTERACTIVE_GOALS, LaneGoals
from engine.core.messages.requests import FinishReason, Lane, LaneMode, Origin, Request, SamplingParams
from engine.pb import engine_pb2 as pb
from engine.pb import engine_pb2_grpc as pb_grpc
from engine.rpc.client import EngineClient
from engine.rpc.stream import EngineUnavailable
from gateway.serve.supervisor import EngineSupervisor

pytestmark = pytest.mark.slow

LONG = 100_000


@pytest.fixture
async def supervisor(tmp_path):
    config = EngineConfig(model="fake", num_pages=30_000, block_size=4, max_seqs=8, max_model_len=110_000)
    async with EngineSupervisor(config, tmp_path / "engine.sock", ("engine.serve.server", "--fake")) as running:
        yield running


@pytest.fixture
async def gateways(supervisor):
    """Two gateway processes' clients of one engine."""
    clients = [EngineClient(supervisor.address) for _ in range(2)]
    for client in clients:
        await client.start()
        await asyncio.wait_for(client.wait_ready(), 120)
    yield clients
    for client in clients:
        await client.close()


def request(name, max_tokens=LONG, lane=Lane.INTERACTIVE, tenant="acme"):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    origin = Origin(f"id-{name}", f"caller-{name}", "abc123", "pirate", "pirate", 50)
    return Request(f"id-{name}-0", (1, 2, 3), params, None, lane, tenant=tenant, origin=origin)


async def last_event(client, wanted):
    async with aclosing(client.generate(wanted)) as events:
        return [event async for arrived in events for event in arrived][-1]


async def until(condition):
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.002)


async def test_any_gateway_sees_and_cancels_the_requests_of_all(gateways):
    one, other = gateways
    running = asyncio.create_task(last_event(one, request("a")))
    await until(lambda: generates(other, "id-a"))
    (live,) = (await other.live_requests(10)).requests
    assert (live.origin.request_id, live.origin.key, live.origin.model) == ("caller-a", "abc123", "pirate")
    assert (live.tenant, live.running, live.prompt_tokens, live.max_tokens) == ("acme", True, 3, LONG)
    assert await other.cancel([live.request_id, "unknown"]) == 1
    event = await asyncio.wait_for(running, 60)
    assert event.finish_reason is FinishReason.ERROR
    assert event.refusal.code.name == "CANCELLED"
    assert await other.cancel([live.request_id]) == 0
    assert (await one.stats(check=True)).violations == []


async def generates(client, name):
    live = (await client.live_requests(100)).requests
    return any(request.origin.id == name and request.generated_tokens for request in live)


async def test_a_long_queue_is_counted_and_not_told(gateways):
    one, other = gateways
    tasks = [
        asyncio.create_task(last_event(one, request(str(number), tenant=f"t{number % 2}"))) for number in range(30)
    ]
    await until(lambda: counts(other, 30))
    shown = await other.live_requests(9)
    assert [live.running for live in shown.requests] == [True] * 8 + [False]
    assert dict(shown.reserved_tokens) == {"t0": 750, "t1": 750}
    every = await other.live_requests(100)
    assert await other.cancel([live.request_id for live in every.requests]) == 30
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert (await other.live_requests(100)).total == 0


async def counts(client, wanted):
    return (await client.live_requests(0)).total == wanted


async def test_a_lane_is_paused_drained_and_opened_for_every_gateway(gateways):
    one, other = gateways
    await one.set_lane(Lane.BATCH, LaneMode.PAUSED)
    assert [lane.mode for lane in (await other.stats()).lanes] == [pb.LANE_MODE_OPEN, pb.LANE_MODE_PAUSED]
    waiting = asyncio.create_task(last_event(other, request("batch", 5, Lane.BATCH)))
    chat = await asyncio.wait_for(last_event(other, request("chat", 5)), 60)
    assert chat.finish_reason is FinishReason.LENGTH
    await until(lambda: counts(one, 1))
    assert not waiting.done()
    await one.set_lane(Lane.BATCH, LaneMode.DRAINING)
    ended = await asyncio.wait_for(waiting, 60)
    assert ended.finish_reason is FinishReason.LENGTH, "what was taken goes on"
    refused = await asyncio.wait_for(last_event(other, request("late", 5, Lane.BATCH)), 60)
    assert refused.refusal.code.value == "lane_queue_full"
    await other.set_lane(Lane.BATCH, LaneMode.OPEN)
    again = await asyncio.wait_for(last_event(one, request("again", 5, Lane.BATCH)), 60)
    assert again.finish_reason is FinishReason.LENGTH


async def test_what_a_lane_promises_is_told_to_the_engine(gateways):
    """It refuses what would have to wait, once its lane promises that nothing does."""
    one, other = gateways
    await refusals(one, "first")  # from which it learns what tokens cost
    await one.set_goals(Lane.INTERACTIVE, LaneGoals(60.0, 60.0, max_wait_s=1e-9))
    assert "queue_timeout" in await refusals(one, "impatient")
    await other.set_goals(Lane.INTERACTIVE, INTERACTIVE_GOALS)
    assert await refusals(one, "patient") == set()


async def refusals(client, name):
    """Send more requests than can run at once, and return the codes of those that are refused."""
    wanted = [last_event(client, request(f"{name}-{number}", 60)) for number in range(60)]
    ends = await asyncio.wait_for(asyncio.gather(*wanted), 60)
    return {end.refusal.code.value for end in ends if end.refusal}


async def test_goals_that_are_none_are_refused(supervisor, gateways):
    async with grpc.aio.insecure_channel(supervisor.address) as channel:
        engine = pb_grpc.EngineStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="ttft_s"):
            await engine.SetGoals(pb.SetGoalsRequest(lane=pb.LANE_BATCH, ttft_seconds=-1.0, itl_seconds=1.0))


async def test_goals_for_an_engine_that_is_gone():
    client = EngineClient("unix:/nowhere/at/all")
    with pytest.raises(EngineUnavailable):
        await client.set_goals(Lane.BATCH, BATCH_GOALS)
    await client.close()
