"""Translates failures of a request: from engine events to API errors, and from errors to the request's record."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from engine.arrivals import CrashesEngines, EngineUnavailable
from engine.core.types import ErrorCode, FinishReason, TokenEvent
from gateway.core.errors import ApiError, Fault, internal, invalid_request, model_not_found, unavailable
from gateway.generation import GenerateRequest
from gateway.request_record import RequestRecord


def note(record: RequestRecord, error: BaseException) -> None:
    """Record how a request failed. An OSError means that the caller's connection is gone: it counts as cancellation."""
    if isinstance(error, ApiError):
        record.end("error", error.http_status, error.code or error.fault.name.lower())
        record.error_metadata = error.metadata
    elif isinstance(error, asyncio.CancelledError | GeneratorExit | OSError):
        record.end("cancelled", 499)
    else:
        record.end("error", 500, "internal_error")


@contextmanager
def engine_failures(record: RequestRecord) -> Iterator[None]:
    """Convert the loss of the engine inside the block to an ApiError, and mark the record for a refund.

    Raises:
        ApiError: ENGINE_UNAVAILABLE, ENGINE_CRASHED.
    """
    try:
        yield
    except CrashesEngines as error:
        record.refund = True
        raise ApiError(Fault.ENGINE_CRASHED, f"{error}; the request is not tried again") from error
    except EngineUnavailable as error:
        record.refund = True
        raise unavailable(Fault.ENGINE_UNAVAILABLE, "the engine stopped; try again") from error


def refuse_failed(event: TokenEvent, record: RequestRecord, request: GenerateRequest) -> None:
    """Raise an ApiError if the event says that the engine refused or aborted the request.

    The error carries the engine's retry delay, if the engine knows one that is long enough.
    """
    if event.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT):
        return
    cancelled = event.refusal is not None and event.refusal.code is ErrorCode.CANCELLED
    record.refund = not cancelled  # what an administrator cancels is charged, as when a caller disconnects
    if event.finish_reason is FinishReason.ABORT:
        raise unavailable(Fault.PREEMPTED, "the engine gave the request up, as when its adapter is unloaded")
    if event.refusal is None:
        raise internal(record.request_id)
    if event.refusal.code is ErrorCode.INVALID_GRAMMAR:
        field = request.grammar_field
        raise invalid_request(f"{field} cannot be followed: {event.refusal.message}", field)
    fault = Fault[event.refusal.code.name]
    if fault is Fault.MODEL_NOT_FOUND:
        raise model_not_found(record.model)
    raise ApiError(fault, event.refusal.message, retry_after=event.refusal.retry_after)
