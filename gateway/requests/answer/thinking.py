"""Ends the reasoning of an answer at its budget, between the two parts in which the engine computes the answer."""

from __future__ import annotations

from typing import Self

from engine.core.messages.requests import FinishReason, Request, TokenEvent
from gateway.requests.answer.resumption import Continuation, ResumingStream
from gateway.requests.thinking import ThinkingBudget


class ThinkingStream:
    """The events of an answer with a thinking budget (see `ThinkingBudget`), both parts in turn."""

    def __init__(
        self, stream: ResumingStream, continuation: Continuation, whole: Request, budget: ThinkingBudget
    ) -> None:
        """`continuation` is that of `stream`, and has the request for the first part; `whole` is the request for the
        whole answer."""
        self._stream = stream
        self._continuation = continuation
        self._whole = whole
        self._budget = budget
        self._is_first_part = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        events = await anext(self._stream)
        if self._is_first_part and events[-1].finish_reason is FinishReason.LENGTH:
            return await self._bridged(events)
        return events

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def _bridged(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events with `ThinkingBudget.bridge` in place of the end of the first part, and let the next read
        submit the second part; or return them as they are if they end the whole answer."""
        continuation, last = self._continuation, events[-1]
        if not self._budget.ends(continuation.produced):
            return events
        self._is_first_part = False
        await self._stream.end_part()
        bridge = self._budget.bridge(continuation.produced, last)
        continuation.produced += bridge.tokens[len(last.tokens) :]
        continuation.request = self._whole
        return [*events[:-1], bridge]
