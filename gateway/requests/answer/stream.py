"""Composes the stream of one answer's events from streams that each do one thing, and accounts for all parts of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from engine.core.messages.requests import ProposalCount, Request, TokenEvent
from engine.core.speculate.tally import sum_proposals
from engine.rpc.api import EngineApi
from engine.rpc.stream import EventStream, PlacedStream
from gateway.requests.answer.crash_trial import CrashTrial
from gateway.requests.answer.resumption import Continuation, ResumingStream, Waits
from gateway.requests.answer.thinking import ThinkingStream
from gateway.requests.thinking import ThinkingBudget


def answer_stream(
    engine: EngineApi,
    request: Request,
    trial: CrashTrial,
    waits: Waits,
    on_move: Callable[[float], None],
    on_placed: Callable[[PlacedStream], None],
    session: str = "",
    budget: ThinkingBudget | None = None,
) -> EventStream:
    """Submit a request, if the engine is ready, and return the stream of its answer's events. From the engine outward:
    hand over after the prompt, resume after a loss, end the reasoning at its budget, account for all parts together.

    Args:
        trial: records the engine processes that the request loses.
        on_move: called when the request continues in another engine process, with the seconds without one.
        on_placed: called with the engine's stream each time that the request was submitted.
        session: see `EngineApi.generate`.
        budget: limits the answer's reasoning, at whose end the request is submitted again. None means no limit.
    """
    continuation = Continuation(request)
    if budget is None:
        return AccountedStream(ResumingStream(engine, continuation, trial, waits, on_move, on_placed, session))
    continuation.request = budget.first_part(request)
    resuming = ResumingStream(engine, continuation, trial, waits, on_move, on_placed, session)
    return AccountedStream(ThinkingStream(resuming, continuation, request, budget))


class AccountedStream:
    """The events of an answer with its device time and proposals in all engine processes together, and the waits and
    cached tokens of the first. A further process has another request id; its admission of the request is left out."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._first: TokenEvent | None = None
        """First event of the answer, from the engine process that began it."""
        self._part_id = ""
        """Id of the request in the engine process that sent the last events."""
        self._device = 0.0
        """Device time of the answer in all engine processes, in seconds."""
        self._device_before = 0.0
        """Device time of the answer in engine processes before the present one, in seconds."""
        self._proposals: tuple[ProposalCount, ...] = ()
        """Counts of the answer's proposals in all engine processes."""
        self._proposals_before: tuple[ProposalCount, ...] = ()
        """Counts of the answer's proposals in engine processes before the present one."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        while not (events := self._accounted(await anext(self._stream))):
            pass
        return events

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _accounted(self, events: list[TokenEvent]) -> list[TokenEvent]:
        last = events[-1]
        if self._first is None:
            self._first, self._part_id = events[0], last.request_id
        elif last.request_id != self._part_id:
            self._part_id = last.request_id
            self._device_before, self._proposals_before = self._device, self._proposals
        self._device = max(self._device, self._device_before + last.device_seconds)
        if last.proposals:
            before = self._proposals_before
            self._proposals = sum_proposals(before, last.proposals) if before else last.proposals
        return events if self._part_id == self._first.request_id else self._totalled(self._first, events)

    def _totalled(self, first: TokenEvent, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return those events of a further engine process that have output or an end, with the answer's totals."""
        return [
            event._replace(
                num_cached=first.num_cached,
                wait=first.wait,
                adapter_wait=first.adapter_wait,
                device_seconds=self._device_before + event.device_seconds,
                proposals=self._proposals,
            )
            for event in events
            if event.tokens or event.prompt_logprobs or event.finish_reason is not None
        ]
