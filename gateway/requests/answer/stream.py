"""Composes the stream of one answer's events from streams that each do one thing."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.messages.requests import Request
from engine.rpc.api import EngineApi
from engine.rpc.stream import EventStream, PlacedStream
from gateway.requests.answer.account import AccountedStream
from gateway.requests.answer.continuation import Continuation
from gateway.requests.answer.crash_trial import CrashTrial
from gateway.requests.answer.resumption import ResumingStream, Waits
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
