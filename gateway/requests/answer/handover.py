"""Continues a request in a second engine after the first one has computed its prompt and first token.

If the second engine refuses the rest or has ended, another one computes it, and the prompt again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from engine.core.messages.requests import FinishReason, TokenEvent
from engine.rpc.stream import EngineUnavailable, EventStream, Handover


class HandoverStream:
    """The events of a request that two engines share, as of one that one engine computes. If the second engine does not
    take the rest, the stream yields an empty list, and the reader has to submit the rest elsewhere."""

    def __init__(self, first: EventStream, handover: Handover, submit: Callable[[Handover], EventStream]) -> None:
        """`first` is the stream of the first engine. `submit` submits the rest of the request, after the tokens that
        this stream has yielded; it raises EngineUnavailable if no engine takes it."""
        self._stream = first
        self._handover = handover
        self._submit = submit
        self._read = self._read_first_part

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        return await self._read()

    async def aclose(self) -> None:
        self._handover.drop()
        await self._stream.aclose()

    async def _read_first_part(self) -> list[TokenEvent]:
        """Return events of the first engine. Hide the end of its part, after which the next read submits the rest; drop
        the handover if the answer has ended already."""
        events = await anext(self._stream)
        last = events[-1]
        if last.finish_reason is FinishReason.LENGTH:
            await self._stream.aclose()
            self._read = self._submit_rest
            return [*events[:-1], last._replace(finish_reason=None)]
        if last.finish_reason is not None:
            self._handover.drop()
        return events

    async def _submit_rest(self) -> list[TokenEvent]:
        try:
            self._stream = self._submit(self._handover)
        except EngineUnavailable:
            return []
        self._read = self._begin_rest
        return await self._begin_rest()

    async def _begin_rest(self) -> list[TokenEvent]:
        """Return events of the second engine until its first token, or none if it refuses the rest."""
        events = await anext(self._stream)
        if any(event.tokens for event in events):
            self._read = self._read_rest
            return events
        return [] if events[-1].finish_reason is FinishReason.ERROR else events

    async def _read_rest(self) -> list[TokenEvent]:
        return await anext(self._stream)
