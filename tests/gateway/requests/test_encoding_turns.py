"""Requests that only count, encode or decode tokens: a tenant's many do not keep another tenant's one waiting."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.errors import ApiError, Fault
from gateway.requests.encoding_turns import AT_ONCE, EncodingTurns


async def work(turns: EncodingTurns, tenant: str, begun: list[str], go_on: asyncio.Event, num_bytes: int = 1) -> None:
    async with turns.take(tenant, num_bytes):
        begun.append(tenant)
        await go_on.wait()


async def test_another_tenant_does_not_wait_for_the_rest_of_a_flood():
    turns, begun, go_on = EncodingTurns(), [], asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for tenant in ("flood",) * 5 + ("neighbour",):
            group.create_task(work(turns, tenant, begun, go_on))
        while len(begun) < 2:
            await asyncio.sleep(0)
        assert sorted(begun) == ["flood", "neighbour"]
        go_on.set()
    assert begun.count("flood") == 5


async def test_no_more_are_in_work_than_leave_threads_to_generations():
    turns, begun, go_on = EncodingTurns(), [], asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(work(turns, f"tenant {number}", begun, go_on))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(begun) == AT_ONCE
        go_on.set()
    assert len(begun) == 5


async def test_what_waits_in_memory_is_bounded_for_each_tenant():
    turns, begun, go_on = EncodingTurns(most_bytes=10), [], asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(work(turns, "flood", begun, go_on, 100))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="try again later") as refusal:
            await work(turns, "flood", begun, go_on)
        assert (refusal.value.fault, refusal.value.retry_after) == (Fault.RATE_LIMIT_EXCEEDED, 1.0)
        group.create_task(work(turns, "neighbour", begun, go_on, 8))
        group.create_task(work(turns, "neighbour", begun, go_on, 2))
        go_on.set()
    await work(turns, "flood", begun, go_on, 10)
    assert begun.count("flood") == begun.count("neighbour") == 2
