"""A burst of one tenant begins a few requests at a time, so that another tenant's request is not behind all of it."""

from __future__ import annotations

import asyncio

from gateway.requests.turns import AT_ONCE, ENCODED_CHARACTERS, EncodingPauses, LoopTurns


async def begin(turns: LoopTurns, tenant: str, begun: list[str]) -> None:
    await turns.take(tenant)
    begun.append(tenant)


async def num_pauses(prompts: int, characters: int) -> int:
    """How often others get a turn while so many prompts of one request are encoded."""
    turns, pauses = [], EncodingPauses()

    async def others() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    for _ in range(prompts):
        await pauses.after(characters)
    task.cancel()
    return len(turns)


async def test_others_get_turns_by_the_length_of_the_prompts_that_are_encoded():
    assert await num_pauses(5, ENCODED_CHARACTERS) == 5
    assert await num_pauses(160, 0) == 10


async def test_another_tenant_begins_before_the_rest_of_a_burst():
    turns, begun = LoopTurns(), []
    burst = [asyncio.create_task(begin(turns, "flood", begun)) for _ in range(100)]
    await asyncio.sleep(0)
    await begin(turns, "neighbour", begun)
    assert begun.count("flood") <= 2 * AT_ONCE
    await asyncio.gather(*burst)
    assert begun.count("flood") == 100


async def test_a_request_that_is_cancelled_gives_its_turn_to_the_next():
    turns, begun = LoopTurns(), []
    burst = [asyncio.create_task(begin(turns, "flood", begun)) for _ in range(3 * AT_ONCE)]
    await asyncio.sleep(0)
    for task in burst[AT_ONCE : 2 * AT_ONCE]:
        task.cancel()
    await asyncio.gather(*burst, return_exceptions=True)
    assert len(begun) == 2 * AT_ONCE


async def test_a_tenant_that_was_refused_begins_one_request_at_a_time(monkeypatch):
    monkeypatch.setattr("gateway.requests.turns.REFUSED_PAUSE_S", 0.001)
    turns, begun = LoopTurns(), []
    await turns.take("neighbour")
    turns.refused("flood")
    burst = [asyncio.create_task(begin(turns, "flood", begun)) for _ in range(10)]
    seen = []
    while len(begun) < 10:
        seen.append(len(begun))
        await asyncio.sleep(0)
    assert set(seen) == set(range(10)), "no two of them begin in the same iteration"
    await asyncio.gather(*burst)


async def test_a_refusal_is_forgotten(monkeypatch):
    monkeypatch.setattr("gateway.requests.turns.REFUSED_FOR_S", 0.0)
    turns, begun = LoopTurns(), []
    await turns.take("neighbour")
    turns.refused("flood")
    await begin(turns, "flood", begun)
    burst = [asyncio.create_task(begin(turns, "flood", begun)) for _ in range(AT_ONCE)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(begun) == AT_ONCE + 1
    await asyncio.gather(*burst)


async def test_a_tenant_that_is_alone_is_not_slowed_down():
    turns, begun = LoopTurns(), []
    await turns.take("flood")
    await asyncio.sleep(0)
    turns.refused("flood")
    burst = [asyncio.create_task(begin(turns, "flood", begun)) for _ in range(AT_ONCE)]
    await asyncio.sleep(0)
    assert len(begun) == AT_ONCE
    await asyncio.gather(*burst)


async def test_nothing_ticks_when_there_is_nothing_to_do():
    turns = LoopTurns()
    await turns.take("tenant")
    for _ in range(3):
        await asyncio.sleep(0)
    assert turns._tick_handle is None
