"""Admits lines for a virtual model: to whichever of its members' engines admits them first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from gateway.batches.gate import AdmissionQueue, EnginePlace, LineGate, Order
from gateway.core.tenants import Tenant

MOST_AT_UPSTREAMS = 32
"""Maximum number of lines of virtual models with upstreams that run at the same time for this process, besides those
that engines admit. It is half of the default `max_requests` of one upstream, so that other requests find room."""


class UpstreamGate:
    """Admits lines to upstreams, which do not tell how many more they would take."""

    is_passable = True
    closed_seconds = 0.0

    def __init__(self) -> None:
        self._queue = AdmissionQueue(lambda: MOST_AT_UPSTREAMS - self._queue.inside)

    def wants_more(self, waiting: int) -> bool:
        return waiting < MOST_AT_UPSTREAMS

    async def enter(self, order: Order) -> EnginePlace:
        await self._queue.enter(order)
        return EnginePlace(self)

    def began(self) -> None:
        """Do nothing: a line counts until it has ended."""

    def leave(self, place: EnginePlace) -> None:
        self._queue.leave()


class RouteGate:
    """Admits this process's lines for one virtual model. A line waits at the gates of all members and takes the first
    place that it gets. The policy may choose another member, whose engine may then hold more lines than its gate
    admits.

    An engine that is away or busy thus holds up no line that another member may answer.
    """

    def __init__(self, gates: Callable[[Tenant | None], Sequence[LineGate]], tenant: Tenant | None = None) -> None:
        """`gates` returns those of the members that may answer a tenant's lines now (None: any tenant's), at least one,
        in the policy's order."""
        self._gates_for = gates
        self._tenant = tenant

    def of(self, tenant: Tenant) -> RouteGate:
        """Return the gate for lines of a tenant, which leads to no member that the tenant may not use."""
        return RouteGate(self._gates_for, tenant)

    @property
    def is_passable(self) -> bool:
        return any(gate.is_passable for gate in self._gates)

    @property
    def closed_seconds(self) -> float:
        return min(gate.closed_seconds for gate in self._gates)

    def wants_more(self, waiting: int) -> bool:
        return any(gate.wants_more(waiting) for gate in self._gates)

    @asynccontextmanager
    async def place(self, order: Order) -> AsyncIterator[EnginePlace]:
        place = await self._first(self._gates, order)
        try:
            yield place
        finally:
            place.leave()

    @property
    def _gates(self) -> Sequence[LineGate]:
        return self._gates_for(self._tenant)

    async def _first(self, gates: Sequence[LineGate], order: Order) -> EnginePlace:
        """Wait at all gates at once, and return the place of the first one that admits the line, which the caller must
        leave. If several admit it at once, the earliest in `gates` wins."""
        if len(gates) == 1:
            return await gates[0].enter(order)
        tries = [asyncio.create_task(gate.enter(order)) for gate in gates]
        chosen: asyncio.Task[EnginePlace] | None = None
        try:
            await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
            chosen = next(attempt for attempt in tries if attempt.done())
            return chosen.result()
        finally:
            for attempt in tries:
                if attempt is not chosen:
                    attempt.cancel()
                    attempt.add_done_callback(_leave)


def _leave(entering: asyncio.Task[EnginePlace]) -> None:
    """Free the place of a gate that admitted a line just after another gate had. Does nothing if `entering` was
    cancelled before that."""
    if not entering.cancelled():
        entering.result().leave()
