"""A request that outlives its engine process: submitted again to the next one, where its answer goes on.

The gateway has the prompt's ids and every token that it has been told. What chooses a token is a function of the seed
and the position, and grammars and penalties follow from the tokens, so the next process goes on as the last one would
have. The caller sees a pause.

A request may itself be what made the process crash. An engine process that comes up says which requests were in the
last step of the process before it. Those go on as suspects: the engine computes their next tokens in steps of their own
(`engine.core.trial`), and one that was alone in the step of a second crash is not tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from engine.arrivals import CrashesEngines, EngineUnavailable, EventStream, GivenUp
from engine.client import EngineApi
from engine.core.types import Request, TokenEvent

MOST_MOVES = 3
"""A request goes on in so many engine processes after its first. An engine that dies more often is of no use to it."""
LEAST_DEADLINE_SECONDS = 0.001


class ResumingStream:
    """The events of one request, from one engine process after another. An `EventStream`."""

    def __init__(
        self, engine: EngineApi, request: Request, wait_seconds: float, on_move: Callable[[float], None]
    ) -> None:
        """Submits the request at once if the engine is ready, else when it is and somebody reads.

        Args:
            wait_seconds: how long the request may be without an engine process, each time.
            on_move: called with the seconds without one when the request goes on in another.
        """
        self._engine = engine
        self._request = request
        self._wait_seconds = wait_seconds
        self._on_move = on_move
        self._now = asyncio.get_running_loop().time
        self._began = self._now()
        self._lost = self._began
        """When the request was last without an engine process."""
        self._stream: EventStream | None = None
        self._life = ""
        """The engine process that has the request, or had it last."""
        self._id = request.id
        """The id by which that process knows the request."""
        self._moves = 0
        self._suspect = False
        self._produced: list[int] = []
        self._first: TokenEvent | None = None
        """What was told first, by the process that began the request."""
        self._device = 0.0
        """Seconds of device time that it has taken in all processes."""
        self._device_before = 0.0
        """The same in processes that have ended."""
        if engine.ready:
            with suppress(EngineUnavailable):
                self._submit()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        """Raises GivenUp: no engine came back in time, too many were lost, or the request makes them crash."""
        while True:
            try:
                if self._stream is None:
                    await self._wait_for_engine()
                    self._submit()
                elif events := self._noted(await anext(self._stream)):
                    return events
            except GivenUp:
                raise
            except EngineUnavailable:
                self._lose()

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()

    def _submit(self) -> None:
        """Give the request to the engine. Raises EngineUnavailable if it has gone again in this moment."""
        self._life = self._engine.info.life
        self._stream = self._engine.generate(self._current())
        if self._moves:
            self._on_move(self._now() - self._lost)

    def _current(self) -> Request:
        """Return the request as the next engine process is to take it up."""
        if not self._moves:
            return self._request
        self._id = f"{self._request.id}+{self._moves}"
        deadline = self._request.deadline
        if deadline is not None:
            deadline = max(LEAST_DEADLINE_SECONDS, deadline - (self._now() - self._began))
        return self._request._replace(
            id=self._id,
            produced=tuple(self._produced),
            moves=self._moves,
            suspect=self._suspect,
            deadline=deadline,
        )

    def _lose(self) -> None:
        """Note that the engine process is gone. Raises GivenUp if it was the last one that is tried."""
        self._stream, self._lost = None, self._now()
        self._device_before = self._device
        self._moves += 1
        if self._moves > MOST_MOVES:
            raise GivenUp(f"{self._moves} engine processes ended while they had the request")

    async def _wait_for_engine(self) -> None:
        try:
            async with asyncio.timeout_at(self._lost + self._wait_seconds):
                await self._engine.wait_ready()
        except TimeoutError:
            reason = f"no engine process was ready within {self._wait_seconds:g} s"
            raise GivenUp(reason) from None
        self._judge()

    def _judge(self) -> None:
        """Suspect the request if it was in the last step of a process that crashed. Raises CrashesEngines."""
        previous = self._engine.info.previous
        if not self._moves or previous.life != self._life or not previous.crashed:
            return
        if self._id in previous.request_ids:
            if self._suspect and len(previous.request_ids) == 1:
                raise CrashesEngines("two engine processes crashed while they computed this request")
            self._suspect = True

    def _noted(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Remember what was told, and say what holds for all processes together where more than one had the request."""
        for event in events:
            self._produced += event.tokens
        self._device = max(self._device, self._device_before + events[-1].device_seconds)
        if not self._moves or self._first is None:
            self._first = self._first or events[0]
            return events
        cached, wait, adapter_wait = self._first.num_cached, self._first.wait, self._first.adapter_wait
        return [
            event._replace(
                num_cached=cached,
                wait=wait,
                adapter_wait=adapter_wait,
                device_seconds=self._device_before + event.device_seconds,
            )
            for event in events
            if event.tokens or event.finish_reason is not None  # it was admitted before
        ]
