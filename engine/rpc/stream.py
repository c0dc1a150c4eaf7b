"""The stream of one request's events: the engine's messages fill it, and the request's handler reads from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol, Self

from engine.core.messages.requests import KvSource, TokenEvent


class EngineUnavailable(Exception):
    """The engine process is gone, restarting or not ready yet, or does not answer. It will not complete the request."""


class EngineLost(EngineUnavailable):
    """The engine process ended, or the connection to it broke, while it held the request."""


class EngineDrained(EngineUnavailable):
    """The engine is being drained, and the request must move to another engine. It did nothing wrong."""


class GivenUp(EngineUnavailable):
    """The request moves to no further engine process: too many ended, none came back in time, or it crashes them."""


class CrashesEngines(GivenUp):
    """Two engine processes crashed while they computed this request, the second while it computed nothing else."""


class EventStream(Protocol):
    """Async iterator over the events of one request. Each item lists all events that have arrived since the previous
    one; the last event carries a finish_reason."""

    def __aiter__(self) -> AsyncIterator[list[TokenEvent]]: ...

    async def __anext__(self) -> list[TokenEvent]:
        """Wait for events and return all that came. Raises EngineUnavailable if the engine is lost before the last
        event, StopAsyncIteration after it."""

    async def aclose(self) -> None:
        """Abort the request, unless it has ended."""


class Handover(Protocol):
    """The continuation of a request in another engine after its first token. That engine fetches the prompt's KV from
    `source` while the first engine computes it."""

    request_id: str
    """Id under which the other engine knows the request."""
    source: KvSource

    def drop(self) -> None:
        """Tell the other engine that the request will not continue there, so that it ends the fetch of the KV. The
        holder must call this unless the request is submitted there; after a submission it does nothing."""


class PlacedStream(EventStream, Protocol):
    """The `EventStream` of a request that was submitted to one engine process, with the engine, the router's reason to
    choose it, and how another engine continues the request."""

    life: str
    """Id of the engine process."""
    engine: str
    """Name of the engine; empty where there is only one."""
    reason: str
    """Why the router chose that engine (see `gateway.routing.router.Reason`). Empty where there is only one engine, and
    for the part of a split request that the second engine computes, because the router decided at the split."""
    handover: Handover | None
    """How another engine continues the request, if this one computes the prompt and the first token only; the stream
    then ends with FinishReason.LENGTH. None means that this engine computes the whole answer."""


class Arrivals:
    """The `PlacedStream` of one request's events: the engine's client fills it with `put` and ends it with `lose`, and
    the request's handler reads from it."""

    __slots__ = (
        "_abandon",
        "_events",
        "_is_over",
        "_loss",
        "_on_end",
        "_reader",
        "engine",
        "handover",
        "life",
        "reason",
    )

    def __init__(self, abandon: Callable[[], None], life: str = "", on_end: Callable[[], None] | None = None) -> None:
        """Args:
        abandon: called when the reader closes the stream before its final event.
        life: id of the engine process that has the request.
        on_end: called once when the engine no longer has the request.
        """
        self.life = life
        self.engine = ""
        self.reason = ""
        self.handover: Handover | None = None
        self._abandon = abandon
        self._on_end = on_end
        self._events: list[TokenEvent] = []
        self._loss: EngineUnavailable | None = None
        self._is_over = False
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        if event.finish_reason is not None:
            self._leave_engine()
        self._wake()

    def lose(self, loss: EngineUnavailable | None = None) -> None:
        """End the stream because the engine is gone, or must not finish the request: after the events received so far,
        the reader gets `loss` (None: EngineLost)."""
        self._loss = loss or EngineLost("the engine stopped while the request ran")
        self._leave_engine()
        self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        if self._is_over:
            raise StopAsyncIteration
        if not self._events and self._loss is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        events, self._events = self._events, []
        self._is_over = not events or events[-1].finish_reason is not None
        if not events:
            raise self._loss or EngineLost("the engine stopped while the request ran")
        return events

    async def aclose(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._leave_engine()
            self._abandon()

    def _leave_engine(self) -> None:
        if self._on_end is not None:
            self._on_end()
            self._on_end = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
