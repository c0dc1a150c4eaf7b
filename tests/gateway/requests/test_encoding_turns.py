"""Requests that only count, encode or decode tokens: a tenant's many do not keep another tenant's one waiting."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.errors import ApiError, Fault
from gateway.core.tenants import Tenant
from gateway.requests.turns import ENCODED_AT_ONCE, EncodingTurns
from gateway.requests.wire_room import WireRoom

ROOM = WireRoom(tenant_bytes=10)


async def work(turns: EncodingTurns, tenant: str, begun: list[str], go_on: asyncio.Event, num_bytes: int = 1) -> None:
    with ROOM.hold(Tenant(tenant)) as hold:
        hold.take(num_bytes)
        async with turns.take(hold):
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
            group.create_task(work(turns, f"tenant-{number}", begun, go_on))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(begun) == ENCODED_AT_ONCE
        go_on.set()
    assert len(begun) == 5


async def test_a_tenant_that_leaves_its_answers_unread_gets_no_more_of_them():
    turns, begun, go_on = EncodingTurns(), [], asyncio.Event()
    go_on.set()
    with ROOM.hold(Tenant("flood")) as waiting, ROOM.hold(Tenant("flood")) as unread:
        waiting.take(8)
        unread.count(100)
        with pytest.raises(ApiError, match="read your answers") as refusal:
            async with turns.take(waiting):
                begun.append("flood")
        assert (refusal.value.fault, refusal.value.retry_after) == (Fault.RATE_LIMIT_EXCEEDED, 1.0)
        await work(turns, "neighbour", begun, go_on)
        unread.free()
        async with turns.take(waiting):
            begun.append("flood")
    assert begun == ["neighbour", "flood"]
