"""The gate of a virtual model: a line takes the first place that a member's gate gives it, and no other."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from gateway.batches import route_gate
from gateway.batches.route_gate import RouteGate, UpstreamGate


@pytest.fixture
def gates(monkeypatch) -> list[UpstreamGate]:
    """Two gates, each with room for one line."""
    monkeypatch.setattr(route_gate, "MOST_AT_UPSTREAMS", 1)
    return [UpstreamGate(), UpstreamGate()]


def inside(gates: list[UpstreamGate]) -> list[tuple[int, int]]:
    return [(gate._queue.inside, gate._queue.queued) for gate in gates]


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_line_has_one_place_and_waits_for_the_first_that_is_free(gates):
    gate, entered = RouteGate(lambda tenant: gates), asyncio.Event()

    async def wait() -> None:
        async with gate.place((3,)):
            entered.set()

    async with AsyncExitStack() as first, AsyncExitStack() as second:
        await first.enter_async_context(gate.place((1,)))
        await turns()
        assert inside(gates) == [(1, 0), (0, 0)]
        await second.enter_async_context(gate.place((2,)))
        await turns()
        assert inside(gates) == [(1, 0), (1, 0)]
        waiting = asyncio.create_task(wait())
        await turns()
        assert inside(gates) == [(1, 1), (1, 1)] and not entered.is_set()
        await second.aclose()
        await waiting
        await turns()
        assert inside(gates) == [(1, 0), (0, 0)]
    assert inside(gates) == [(0, 0), (0, 0)]


async def test_a_line_that_is_given_up_waits_nowhere(gates):
    gate = RouteGate(lambda tenant: gates)
    async with gate.place((1,)), gate.place((2,)):
        waiting = asyncio.create_task(AsyncExitStack().enter_async_context(gate.place((3,))))
        await turns()
        waiting.cancel()
        await turns()
        assert inside(gates) == [(1, 0), (1, 0)]
    assert inside(gates) == [(0, 0), (0, 0)]
