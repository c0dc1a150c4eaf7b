"""Record of one request, for usage accounting, metrics, traces and the log, and how failures enter it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType

import structlog
from msgspec import Struct, field

from engine.core.messages.requests import ErrorCode, FinishReason, Lane, TokenEvent
from engine.rpc.stream import CrashesEngines, EngineUnavailable
from gateway.core.errors import ApiError, Fault, internal, invalid_request, model_not_found, unavailable
from gateway.core.tenants import Principal
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.core.usage import NOTHING, Counts, DeferredUsage
from gateway.requests.progress import RequestTimes, Work
from gateway.requests.types import GenerateRequest

log = structlog.get_logger("gateway")


class Caller(Struct, frozen=True):
    """The sender of a request. All fields are empty before it has authenticated."""

    tenant: str = ""
    key_id: str = ""
    limits_key: str = ""
    """Id of the key under which the limits and use of the caller's key are kept (see `Principal.limits_key`)."""


STRANGER = Caller()
"""A caller that has not authenticated."""


class Asked(Struct):
    """What a caller asked for."""

    model: str = ""
    """Model name as the caller wrote it."""
    lane: Lane | None = None
    n: int = 1
    """Number of answers for each prompt."""
    max_tokens: int = 0
    """Maximum output tokens of an answer, once the backend has cut them to what it can compute."""


class Served(Struct):
    """What serves a request. All is empty if the request was refused before that was known."""

    base_model: str = ""
    """Name of the base model or of the upstream."""
    adapter: str | None = None
    adapter_hash: str = ""
    member: str = ""
    """Member that serves the virtual model that was asked for; empty if that is no virtual model."""
    member_reason: str = ""
    """Why that member serves it, in one word."""

    @property
    def name(self) -> str:
        """Name of the adapter, or of the base model for a request without one. Limits and usage are counted under
        it."""
        return self.adapter or self.base_model


class Charge(Enum):
    """State of a request's charge, which says whether the tenant pays for tokens. It goes from PENDING to DUE, back to
    PENDING if the work that was begun early is dropped, and from each of them to WAIVED, where it stays."""

    PENDING = "pending"
    """Nothing is charged, because no engine and no upstream has had the request, or its work no longer counts."""
    DUE = "due"
    """The prompt and the tokens that have come are charged."""
    WAIVED = "waived"
    """Nothing is charged, because the engine or the upstream failed or refused the request, or because it is a shadow
    copy, which no tenant asked for."""


class Bill(Struct):
    """What a request has reserved from its tenant's limits, and whether what it computes is charged."""

    charge: Charge = Charge.PENDING
    reserved_tokens: int = 0
    is_granted: bool = False
    """True means that the limiter admitted the request, which therefore counts in the requests per minute."""
    shadowed: tuple[tuple[str, str], ...] = ()
    """Limits in shadow mode that would have refused the request, as pairs of scope kind and name."""
    deferred: DeferredUsage | None = None
    """Where the usage of a batch's line is written at its settlement, in place of being counted."""

    @property
    def is_due(self) -> bool:
        return self.charge is Charge.DUE

    def fall_due(self) -> None:
        """Charge the request from now on, because an engine or an upstream has it, unless the charge is waived."""
        if self.charge is Charge.PENDING:
            self.charge = Charge.DUE

    def drop(self) -> None:
        """Charge nothing of what was begun before the limiter refused the request."""
        if self.charge is Charge.DUE:
            self.charge = Charge.PENDING

    def waive(self) -> None:
        """Charge nothing, now and later."""
        self.charge = Charge.WAIVED


class EngineHistory(Struct):
    """Which engines had a request."""

    last: str = ""
    """Name of the engine that an answer was last sent to; empty where there is only one."""
    routes: list[str] = field(default_factory=list)
    """Why the router chose an engine (see `gateway.routing.decision.Reason`), for each answer and move; empty where
    there is only one engine."""
    moves: list[float] = field(default_factory=list)
    """Seconds that an answer was without an engine process, for each move of an answer to another engine process."""
    suspect: bool = False
    """True means that an engine process of another member of the virtual model ended while it had the request."""
    doubts: int = 0
    """Number of engine processes that ended while they had the request and may have crashed because of it: the maximum
    over its answers. It is set when the request has ended."""


class Outcome(Struct, frozen=True):
    """How a request ended."""

    finish: str
    """`stop`, `length`, `pooled`, `cancelled` or `error`; empty while the request runs."""
    status: int = 200
    """HTTP status of the response, for gRPC too; 499 means that the caller disconnected."""
    error_code: str = ""
    error_metadata: Mapping[str, str] = MappingProxyType({})


RUNNING = Outcome("")


class RequestRecord(Struct):
    """Facts about one request, updated while it runs, in parts that each hold one idea."""

    id: str
    request_id: str
    caller: Caller
    asked: Asked
    lane: Lane | None
    """None means that the request was refused before its lane was known."""
    times: RequestTimes
    ingress: Ingress = UNKNOWN
    trace_id: str = ""
    """Id of the trace that the caller sent or, set by tracing, that begins at this gateway; empty if there is none."""
    served: Served = field(default_factory=Served)
    work: Work = field(default_factory=Work)
    bill: Bill = field(default_factory=Bill)
    engines: EngineHistory = field(default_factory=EngineHistory)
    outcome: Outcome = RUNNING

    @property
    def used_tokens(self) -> int:
        """Tokens to charge: the prompt and all generated tokens if the charge is due, else 0."""
        return self.work.tokens if self.bill.is_due else 0

    def counts(self) -> Counts:
        """Return the usage to count so far, which is `NOTHING` unless the charge is due."""
        return self.work.counts() if self.bill.is_due else NOTHING

    @property
    def tpot_seconds(self) -> float | None:
        """Mean seconds per output token after the first (TPOT). None means that there are fewer than two tokens."""
        span, tokens = self.times.decode_seconds, self.work.completion_tokens
        return None if span is None or tokens < 2 else span / (tokens - 1)

    def withdraw(self) -> None:
        """Record that the request does not count as submitted, because the limiter did not grant it: work that the
        engine has begun is dropped and not charged."""
        self.times.submitted = None
        self.bill.drop()

    def note_event(self, prompt: int, index: int, event: TokenEvent, now: float) -> None:
        """Record what an engine's event, which came `now`, says about the answer `index` to the prompt `prompt`."""
        if self.times.admitted is None:
            self.times.note_admission(event, now)
        self.work.note_event(prompt, index, event)

    def end(self, finish: str, status: int, error_code: str = "", metadata: Mapping[str, str] | None = None) -> None:
        self.outcome = Outcome(finish, status, error_code, metadata or {})


def caller_of(principal: Principal) -> Caller:
    return Caller(principal.tenant.name, principal.key_id, principal.limits_key)


def record_error(record: RequestRecord, error: BaseException) -> None:
    """Set the record's outcome according to an error. An ApiError gives `error` and its own status and code, a
    cancellation or an OSError (the caller has disconnected) `cancelled` and 499, and anything else `error` and 500."""
    if isinstance(error, ApiError):
        record.end("error", error.http_status, error.code or error.fault.name.lower(), error.metadata)
    elif isinstance(error, asyncio.CancelledError | GeneratorExit | OSError):
        record.end("cancelled", 499)
    else:
        record.end("error", 500, "internal_error")


@contextmanager
def engine_failures(bill: Bill) -> Iterator[None]:
    """Convert an EngineUnavailable that the block raises to ApiError (ENGINE_UNAVAILABLE, or ENGINE_CRASHED if the
    request makes engines crash), and waive the charge."""
    try:
        yield
    except CrashesEngines as error:
        bill.waive()
        raise ApiError(Fault.ENGINE_CRASHED, f"{error}; the request is not tried again") from error
    except EngineUnavailable as error:
        bill.waive()
        raise unavailable(Fault.ENGINE_UNAVAILABLE, "the engine stopped; try again") from error


def refuse_failed(event: TokenEvent, record: RequestRecord, request: GenerateRequest) -> None:
    """Raise an ApiError if the event says that the engine refused or aborted the request: PREEMPTED for an abort,
    INTERNAL for a refusal without a reason, INVALID_REQUEST for a bad grammar, else the fault that the reason names,
    with its retry delay.

    The charge is waived first, except if an administrator cancelled the request, or if the caller's grammar came to an
    end in the middle of an answer, which would otherwise be free.
    """
    if event.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT):
        return
    code = None if event.refusal is None else event.refusal.code
    began = record.times.first_token is not None
    # What an administrator cancels is charged, as when a caller disconnects.
    is_charged = code is ErrorCode.CANCELLED or (code is ErrorCode.INVALID_GRAMMAR and began)
    if not is_charged:
        record.bill.waive()
    if event.finish_reason is FinishReason.ABORT:
        raise unavailable(Fault.PREEMPTED, "the engine gave the request up, as when its adapter is unloaded")
    if event.refusal is None:
        raise internal(record.request_id)
    if event.refusal.code is ErrorCode.MODEL_OUTPUT_INVALID:
        of = record.served
        served = {"model": of.base_model, "adapter": of.adapter, "adapter_version": of.adapter_hash or None}
        log.error("model_output_invalid", **served, request_id=record.request_id, reason=event.refusal.message)
    if event.refusal.code is ErrorCode.INVALID_GRAMMAR:
        field = request.fields.grammar
        raise invalid_request(f"{field} cannot be followed: {event.refusal.message}", field)
    fault = Fault[event.refusal.code.name]
    if fault is Fault.MODEL_NOT_FOUND:
        raise model_not_found(record.asked.model)
    raise ApiError(fault, event.refusal.message, retry_after=event.refusal.retry_after)
