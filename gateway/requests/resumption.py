"""Resubmits requests after the engine process has ended: the next engine process continues their answers.

The gateway has the prompt's ids and every token that the engine has sent. The random draw for a token is a function of
the seed and the position, and the states of grammars and penalties follow from the tokens, so the next process
continues as the previous one would have. The caller sees a pause.

A request may itself have made the process crash. A new engine process reports which requests were in the last step of
the process before it. They are resubmitted as suspects: the engine computes their next tokens in separate steps
(`engine.core.plan.next_step`), and a suspect that was alone in the last step before another crash is not resubmitted.

Where there are several engines, a request moves to another one at once, before the successor of its own has reported
how that ended. It moves as a suspect, which costs a few steps. If its engine ends again while it is on trial, the
request waits for the successor's report, so that a request that crashes engines takes down no more than two. If no
successor comes in time, it ends with an error. If one comes that knows nothing of its predecessor, or the engine is
removed, the request goes on as a suspect, through `MOST_MOVES` engine processes at most. A request for a virtual model
that moves to another member because its engine ended comes there as a suspect, too.

An engine may compute only the first token of a request, which another one continues (`Handover`). If that one refuses
it or has ended, the request moves like any other, and its prompt is computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from engine.core.messages.prompt_logprobs import row_bytes
from engine.core.messages.requests import FinishReason, ProposalCount, Request, TokenEvent
from engine.core.speculate.tally import sum_proposals
from engine.core.state.sequence import TRIAL_TOKENS_HELD
from engine.rpc.api import EngineApi
from engine.rpc.stream import CrashesEngines, EngineDrained, EngineUnavailable, GivenUp, Handover, PlacedStream
from gateway.requests.thinking import ThinkingBudget

MOST_MOVES = 3
"""Maximum number of engine processes in which a request continues after the first one. If more of them end, the request
is given up."""
RESUBMIT_SECONDS = 0.1
"""Pause in seconds before a request is submitted again that no engine took, as while its adapter is being loaded."""
LEAST_DEADLINE_SECONDS = 0.001


class ResumingStream:
    """The `EventStream` of one answer. If the engine process ends, the stream submits the request, with the tokens
    produced so far, to the next engine process, up to `MOST_MOVES` times."""

    def __init__(
        self,
        engine: EngineApi,
        request: Request,
        wait_seconds: float,
        on_move: Callable[[float], None],
        on_placed: Callable[[PlacedStream], None],
        session: str = "",
        budget: ThinkingBudget | None = None,
        first_wait: float | None = None,
    ) -> None:
        """Submit the request at once if the engine is ready; otherwise the first read waits for it and then submits.

        Args:
            wait_seconds: how long, in seconds, the request may be without an engine process each time.
            on_move: called when the request continues in another engine process, with the seconds without one.
            on_placed: called with the new stream each time that the request was submitted.
            session: see `EngineApi.generate`.
            budget: limits the answer's reasoning, at whose end the request is submitted again. None means no limit.
            first_wait: `wait_seconds` until the first token. None means that `wait_seconds` applies from the start.
        """
        self._engine = engine
        self._request = request
        self._session = session
        self._budget = budget
        """Limit of the answer's reasoning while its first part runs. None means that the answer has one part only, or
        that its second part runs."""
        self._on_placed = on_placed
        self._wait_seconds = wait_seconds
        self._first_wait = wait_seconds if first_wait is None else first_wait
        self._on_move = on_move
        self._now = asyncio.get_running_loop().time
        self._began = self._now()
        self._lost = self._began
        """When the request last became without an engine process, in seconds on the loop's clock."""
        self._loss: EngineUnavailable | None = None
        """Why the request left its engine process, from then until another process has it. None means that no move is
        pending, as between the two parts of an answer."""
        self._stream: PlacedStream | None = None
        self._handover: Handover | None = None
        """The handover to the engine that continues the request. None means that `_stream` does not end with the first
        token."""
        self._handed: Handover | None = None
        """The handover with which the request is to be submitted next or, while `_stream` is set, was submitted. None
        means that there is none, or that tokens have come since."""
        self._life = ""
        """Id of the engine process that has the request, or had it last."""
        self._id = request.id
        """Id under which the request was submitted to that process."""
        self._times_before = 0
        """Number of times that the request was in an engine process before; the present or next time does not count."""
        self._losses = 0
        """Number of engine processes that ended while they had the request. Those that were drained do not count."""
        self.doubts = 0
        """Number of engine processes that ended while they had the request and may have crashed because of it."""
        self._suspect = request.suspect
        self._awaits_report = False
        """True while the request waits for a report on how its engine process ended."""
        self._proven_from = TRIAL_TOKENS_HELD if request.suspect else 0
        """Number of produced tokens from which on a suspect is not on trial any more."""
        self._produced: list[int] = []
        self._scored_bytes = 0
        """Number of bytes of prompt log probabilities that have come."""
        self._first: TokenEvent | None = None
        """First event of the request, from the engine process that began it."""
        self._device = 0.0
        """Device time of the request in all engine processes, in seconds."""
        self._device_before = 0.0
        """Device time of the request in engine processes that have ended, in seconds."""
        self._proposals: tuple[ProposalCount, ...] = ()
        """Counts of the request's proposals in all engine processes."""
        self._proposals_before: tuple[ProposalCount, ...] = ()
        """Counts of the request's proposals in engine processes that have ended."""
        if engine.ready:
            self._is_submitted()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        """Wait for events and return them. If the engine process ends, continue the request in the next one. Raises
        GivenUp: no engine process came back in time, too many ended, or (CrashesEngines) the request crashes them."""
        while True:
            try:
                if self._stream is None:
                    await self._place()
                elif events := self._noted(await self._handed_over(await anext(self._stream))):
                    return await self._bridged(self._budget, events) if self._budget else events
            except GivenUp:
                raise
            except EngineUnavailable as error:
                self._lose(error)

    async def aclose(self) -> None:
        self._drop_handover()
        if self._stream is not None:
            await self._stream.aclose()

    def _submit(self) -> None:
        """Submit the request to the engine, and after a move report the seconds without an engine to `on_move`. Raises
        EngineUnavailable if the engine has just gone again."""
        request = self._current()
        if self._handed is None:
            self._stream = self._engine.generate(request, self._session)
        else:
            self._id, handed = self._handed.request_id, self._handed
            request = request._replace(id=self._id, kv_source=handed.source)
            self._stream = self._engine.generate(request, self._session, handed)
        self._life, self._handover = self._stream.life, self._stream.handover
        self._on_placed(self._stream)
        if self._loss is not None:
            self._loss = None
            self._on_move(self._now() - self._lost)

    def _current(self) -> Request:
        """Return the request to submit next: the original one or, after a move or the first part of an answer, a copy
        that continues after the tokens produced so far."""
        request = self._budget.first_part(self._request) if self._budget else self._request
        if not self._times_before:
            return request
        self._id = f"{request.id}+{self._times_before}"
        deadline = request.deadline
        if deadline is not None:
            deadline = max(LEAST_DEADLINE_SECONDS, deadline - (self._now() - self._began))
        return request._replace(
            id=self._id,
            produced=tuple(self._produced),
            num_scored=self._scored_bytes // row_bytes(request.params.prompt_logprobs or 0),
            moves=self._times_before,
            suspect=self._suspect,
            deadline=deadline,
        )

    async def _handed_over(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events for the reader, for a request that two engines may share (`Handover`). If the first engine
        ends its part, after the first token, hide that end, so that the next read submits the rest to the second one.
        If the second engine refuses the rest, return no events and leave it, so that another engine gets the rest."""
        last = events[-1]
        if self._handover is not None and last.finish_reason is FinishReason.LENGTH:
            handover, self._handover = self._handover, None
            await self._end_part()
            self._handed = handover
            return [*events[:-1], last._replace(finish_reason=None)]
        is_refused = last.finish_reason is FinishReason.ERROR and not any(event.tokens for event in events)
        if is_refused and self._handed is not None:
            self._drop_handover()
            await self._end_part()
            return []
        if last.finish_reason is not None or (self._handed is not None and last.tokens):
            self._drop_handover()
        return events

    async def _end_part(self) -> None:
        """Close the engine's stream after a part of the answer (as at a handover or at the end of a thinking budget),
        and note that the request is in no engine process."""
        assert self._stream is not None, "the part's events came from it"
        await self._stream.aclose()
        self._leave()

    def _drop_handover(self) -> None:
        for handover in (self._handover, self._handed):
            if handover is not None:
                handover.drop()
        self._handover = self._handed = None

    async def _bridged(self, budget: ThinkingBudget, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events for the reader. If they end the first part of an answer with a thinking budget, replace
        that end by `ThinkingBudget.bridge` and submit the second part at the next read."""
        if events[-1].finish_reason is not FinishReason.LENGTH or not budget.ends(self._produced):
            return events
        await self._end_part()
        bridge = budget.bridge(self._produced, events[-1])
        self._produced += bridge.tokens[len(events[-1].tokens) :]
        self._budget = None
        return [*events[:-1], bridge]

    def _lose(self, loss: EngineUnavailable) -> None:
        """Prepare for a move to the next engine process, because the present one is gone or is being drained. Raises
        GivenUp if the request has lost `MOST_MOVES` engine processes already."""
        self._drop_handover()
        self._leave()
        self._loss = loss
        if isinstance(loss, EngineDrained):
            return
        self._losses += 1
        self.doubts += 1
        if self._losses > MOST_MOVES:
            raise GivenUp(f"{self._losses} engine processes ended while they had the request")

    def _leave(self) -> None:
        """Note that the request is in no engine process from now on."""
        self._stream, self._lost = None, self._now()
        self._device_before, self._proposals_before = self._device, self._proposals
        self._times_before += 1

    async def _place(self) -> None:
        """Wait for an engine that takes the request, and submit it. Raises GivenUp if none took it in time, and
        CrashesEngines (see `_judge`)."""
        # A suspect that loses an engine process waits for the report: it must not go on to another member's engines.
        waits = bool(self._produced) or (self._suspect and self.doubts > 0)
        seconds = self._wait_seconds if waits else self._first_wait
        try:
            async with asyncio.timeout_at(self._lost + seconds):
                await self._engine.wait_ready()
                if self._loss is not None and not isinstance(self._loss, EngineDrained):
                    await self._judge()
                while not self._is_submitted():
                    await asyncio.sleep(RESUBMIT_SECONDS)
                    await self._engine.wait_ready()
        except TimeoutError:
            what = "told how the one that had the request alone ended" if self._awaits_report else "was ready"
            raise GivenUp(f"no engine process {what} within {seconds:g} s") from None

    def _is_submitted(self) -> bool:
        """Submit the request and return True, or return False if no engine takes it now."""
        with suppress(EngineUnavailable):
            self._submit()
            return True
        return False

    async def _judge(self) -> None:
        """Decide whether the request may have made its engine process crash. It becomes a suspect if it was in the last
        step of a process that crashed, or if that is not known; a request on trial first waits for the report. If it is
        cleared, `doubts` falls again. Raises CrashesEngines if it was a suspect already and alone in that step."""
        fate = self._engine.fate(self._life)
        if fate is None and self._suspect and len(self._produced) < self._proven_from:
            self._awaits_report = True
            fate = await self._engine.learn_fate(self._life)
            self._awaits_report = False
            await self._engine.wait_ready()
        if fate is None or (fate.crashed and self._id in fate.request_ids):
            if self._suspect and fate is not None and len(fate.request_ids) == 1:
                raise CrashesEngines("two engine processes crashed while they computed this request")
            self._suspect = True
            self._proven_from = len(self._produced) + TRIAL_TOKENS_HELD
        else:
            self.doubts -= 1

    def _noted(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Record the tokens, prompt log probabilities, device time and proposals of events, and return the events for
        the reader. After a move, only events with output or an end are returned. They have the waits and cached tokens
        of the first process, and the device time and proposals of all processes together."""
        if not events:
            return events
        for event in events:
            self._produced += event.tokens
            self._scored_bytes += len(event.prompt_logprobs)
        self._device = max(self._device, self._device_before + events[-1].device_seconds)
        if latest := events[-1].proposals:
            before = self._proposals_before
            self._proposals = sum_proposals(before, latest) if before else latest
        if not self._times_before or self._first is None:
            self._first = self._first or events[0]
            return events
        cached, wait, adapter_wait = self._first.num_cached, self._first.wait, self._first.adapter_wait
        return [
            event._replace(
                num_cached=cached,
                wait=wait,
                adapter_wait=adapter_wait,
                device_seconds=self._device_before + event.device_seconds,
                proposals=self._proposals,
            )
            for event in events
            if event.tokens or event.prompt_logprobs or event.finish_reason is not None  # not the admission again
        ]
