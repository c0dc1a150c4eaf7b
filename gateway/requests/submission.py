"""Submits a request to the engine once, before or after its reservation is granted, and aborts unfinished answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import structlog

from engine.core.messages.requests import FinishReason, Request, TokenEvent
from engine.rpc.api import EngineApi
from engine.rpc.stream import Arrivals, EventStream, PlacedStream
from gateway.requests.answer.crash_trial import CrashTrial
from gateway.requests.answer.resumption import AccountedStream, Continuation, ResumingStream, Waits
from gateway.requests.answer.thinking import ThinkingBudget, ThinkingStream
from gateway.requests.job import GenerationJob
from gateway.requests.record import RequestRecord
from gateway.requests.settings import ServiceSettings

log = structlog.get_logger("gateway")


class Submission:
    """The engine streams of one request, one for each answer. `aclose` aborts answers that have not ended."""

    def __init__(
        self,
        engine: EngineApi,
        job: GenerationJob,
        record: RequestRecord,
        clock: Callable[[], float],
        settings: ServiceSettings,
        first_wait: float | None = None,
    ) -> None:
        """`clock` is the record's clock. An answer fails once it has been without an engine for the settings'
        `engine_wait` seconds at a stretch; before its first token, for `first_wait` seconds, unless that is None."""
        self._engine = engine
        self._job = job
        self._record = record
        self._clock = clock
        self._waits = Waits(settings.engine_wait if first_wait is None else first_wait, settings.engine_wait)
        self._most_at_once = settings.max_choices
        self._streams: list[EventStream] = []
        self._trials: list[CrashTrial] = []
        """One for each answer that was sent to the engine."""

    def begin(self) -> Sequence[EventStream]:
        """Submit the request and return one stream for each answer; further calls return the same streams.

        The first call records the submission; the charge falls due when an engine has an answer. If the engine is not
        ready, a stream submits its answer when it is read. So does every stream after the first `max_choices`, which
        only requests for vectors have: their prompts must not fill the engine's queue. An answer with max_tokens 0 ends
        at once and is not sent to the engine, unless a vector or log probabilities of its prompt are wanted.
        """
        if not self._streams:
            self._record.times.submitted = self._clock()
            most = self._most_at_once
            self._streams += [self._stream(index) for index in range(min(most, self._job.num_answers))]
            self._streams += [self._later(index) for index in range(most, self._job.num_answers)]
        return self._streams

    async def _later(self, index: int) -> AsyncGenerator[list[TokenEvent], None]:
        async with aclosing(self._stream(index)) as stream:
            async for events in stream:
                yield events

    def _stream(self, index: int) -> EventStream:
        request = self._job.engine_request(self._record, index, self._clock())
        params = request.params
        if not params.max_tokens and params.prompt_logprobs is None and request.pooling is None:
            self._record.bill.fall_due()
            return _nothing(request.id)
        budget = self._job.budget if self._job.budget and self._job.budget.applies_to(request) else None
        trial = CrashTrial(self._engine, request.suspect)
        self._trials.append(trial)
        return answer_stream(
            self._engine, request, trial, self._waits, self._note_move, self._note_place, self._session(), budget
        )

    def _session(self) -> str:
        """Return the caller's session with the tenant's name before it, so that tenants do not share sessions. Empty
        means that the caller named none."""
        session = self._record.ingress.session
        return f"{self._record.caller.tenant}/{session}" if session else ""

    def _note_place(self, stream: PlacedStream) -> None:
        self._record.bill.fall_due()
        engines = self._record.engines
        engines.last = stream.engine or engines.last
        if stream.reason:
            engines.routes.append(stream.reason)

    def _note_move(self, seconds: float) -> None:
        self._record.engines.moves.append(seconds)
        log.warning("request_moved", request_id=self._record.request_id, seconds=round(seconds, 3))

    async def aclose(self) -> None:
        self._record.engines.doubts = max((trial.doubts for trial in self._trials), default=0)
        for stream in self._streams:
            await stream.aclose()


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


def _nothing(request_id: str) -> EventStream:
    """Return the stream of an answer whose max_tokens is 0: a single event that ends it."""
    arrivals = Arrivals(lambda: None)
    arrivals.put(TokenEvent(request_id, finish_reason=FinishReason.LENGTH))
    return arrivals
