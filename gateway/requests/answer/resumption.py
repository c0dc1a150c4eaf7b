"""Resubmits a request after its engine process has ended: the next engine process continues the answer, and both parts
are accounted for as one.

The gateway has the prompt's ids and every token that the engine has sent. The random draw for a token is a function of
the seed and the position, and the states of grammars and penalties follow from the tokens, so the next process
continues as the previous one would have. The caller sees a pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

from engine.core.messages.prompt_logprobs import row_bytes
from engine.core.messages.requests import ProposalCount, Request, TokenEvent
from engine.core.speculate.tally import sum_proposals
from engine.rpc.api import EngineApi
from engine.rpc.stream import EngineUnavailable, EventStream, GivenUp, Handover, PlacedStream
from gateway.requests.answer.crash_trial import CrashTrial
from gateway.requests.answer.handover import HandoverStream

RESUBMIT_SECONDS = 0.1
"""Pause in seconds before a request is submitted again that no engine took, as while its adapter is being loaded."""
LEAST_DEADLINE_SECONDS = 0.001
"""Deadline in seconds of a part that begins after the deadline of its answer."""


class Waits(NamedTuple):
    """How long, in seconds, a request may be without an engine process at a stretch."""

    first: float
    """Before its first token has come."""
    later: float


class Continuation:
    """The request of an answer and what earlier engine processes have computed of it. Each submission to an engine
    process begins another part of the answer."""

    def __init__(self, request: Request) -> None:
        self.request = request
        """The request as its caller wants it. The parts of an answer may have different limits, so it can be set."""
        self.produced: list[int] = []
        """Tokens of the answer so far."""
        self._scored_bytes = 0
        """Number of bytes of prompt log probabilities that have come."""
        self._num_parts = 0
        """Number of times that the request was submitted to an engine process."""
        self._now = asyncio.get_running_loop().time
        self._began = self._now()

    def next_request(self, *, suspect: bool) -> Request:
        """Return the request for the next part: the original one or, if an engine process has had it, a copy that goes
        on after the tokens produced so far, with an id of its own. `suspect` is set in the copy."""
        if not self._num_parts:
            return self.request
        request = self.request
        deadline = request.deadline
        if deadline is not None:
            deadline = max(LEAST_DEADLINE_SECONDS, deadline - (self._now() - self._began))
        return request._replace(
            id=f"{request.id}+{self._num_parts}",
            produced=tuple(self.produced),
            num_scored=self._scored_bytes // row_bytes(request.params.prompt_logprobs or 0),
            moves=self._num_parts,
            suspect=suspect,
            deadline=deadline,
        )

    def note_submitted(self) -> None:
        """Record that an engine process has got the request for the next part."""
        self._num_parts += 1

    def note_events(self, events: Iterable[TokenEvent]) -> None:
        """Record the tokens and prompt log probabilities of events."""
        for event in events:
            self.produced += event.tokens
            self._scored_bytes += len(event.prompt_logprobs)


class ResumingStream:
    """The events of one answer, all parts of it in turn. If the engine process ends or is drained, the stream submits
    what is missing of the answer to the next engine process."""

    def __init__(
        self,
        engine: EngineApi,
        continuation: Continuation,
        trial: CrashTrial,
        waits: Waits,
        on_move: Callable[[float], None],
        on_placed: Callable[[PlacedStream], None],
        session: str,
    ) -> None:
        """Submit the request at once if the engine is ready; otherwise the first read waits for it and then submits.
        `answer_stream` explains the arguments."""
        self._engine = engine
        self._continuation = continuation
        self._trial = trial
        self._waits = waits
        self._on_move = on_move
        self._on_placed = on_placed
        self._session = session
        self._lost = asyncio.get_running_loop().time()
        """When the request last became without an engine process, in seconds on the loop's clock."""
        self._is_moving = False
        """True from the loss of an engine process until another one has the request."""
        self._stream = self._submitted() if engine.ready else None
        """Events of the part that an engine process computes. None means that no process has the request."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        """Wait for events and return them. If the engine process ends, continue the request in the next one. Raises
        GivenUp: no engine process came back in time, too many ended, or (CrashesEngines) the request crashes them."""
        while True:
            try:
                if self._stream is None:
                    self._stream = await self._placed()
                events = await anext(self._stream)
            except GivenUp:
                raise
            except EngineUnavailable as loss:
                await self.end_part()
                self._is_moving = True
                self._trial.lose(loss)
                continue
            if events:
                self._continuation.note_events(events)
                return events
            await self.end_part()  # the second engine of a handover has not taken the rest

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()

    async def end_part(self) -> None:
        """Take the request from its engine process. The next read submits what is missing of the answer."""
        if self._stream is not None:
            await self._stream.aclose()
        self._stream, self._lost = None, asyncio.get_running_loop().time()

    async def _placed(self) -> EventStream:
        """Wait for an engine that takes the request, and return the stream of its events. Raises GivenUp if none took
        it in time, and CrashesEngines (see `CrashTrial.judge`)."""
        # A suspect that loses an engine process waits for the report: it must not go on to another member's engines.
        produced, trial = self._continuation.produced, self._trial
        has_begun = bool(produced) or (trial.is_suspect and trial.doubts > 0)
        seconds = self._waits.later if has_begun else self._waits.first
        try:
            async with asyncio.timeout_at(self._lost + seconds):
                await self._engine.wait_ready()
                await trial.judge(len(produced))
                while (stream := self._submitted()) is None:
                    await asyncio.sleep(RESUBMIT_SECONDS)
                    await self._engine.wait_ready()
                return stream
        except TimeoutError:
            what = "told how the one that had the request alone ended" if trial.awaits_report else "was ready"
            raise GivenUp(f"no engine process {what} within {seconds:g} s") from None

    def _submitted(self) -> EventStream | None:
        """Submit the request and return the stream of its events, or None if no engine takes it now. After a move,
        report the seconds without an engine to `on_move`."""
        try:
            placed = self._submit()
        except EngineUnavailable:
            return None
        if self._is_moving:
            self._is_moving = False
            self._on_move(asyncio.get_running_loop().time() - self._lost)
        return placed if placed.handover is None else HandoverStream(placed, placed.handover, self._submit)

    def _submit(self, handover: Handover | None = None) -> PlacedStream:
        """Submit what is missing of the answer, to the engine of `handover` if it is given. Raises EngineUnavailable if
        no engine takes it."""
        request = self._continuation.next_request(suspect=self._trial.is_suspect)
        if handover is not None:
            request = request._replace(id=handover.request_id, kv_source=handover.source)
        placed = self._engine.generate(request, self._session, handover)
        self._continuation.note_submitted()
        self._trial.note_submitted(placed.life, request.id)
        self._on_placed(placed)
        return placed


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
