"""Record of one request, for usage accounting, metrics, traces and the log, and how failures enter it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import structlog
from msgspec import Struct, field

from engine.core.messages.requests import ErrorCode, FinishReason, Lane, ProposalCount, TokenEvent
from engine.core.speculate.prediction import PREDICTION
from engine.rpc.stream import CrashesEngines, EngineUnavailable
from gateway.core.errors import ApiError, Fault, internal, invalid_request, model_not_found, unavailable
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.core.usage import NOTHING, Counts, DeferredUsage
from gateway.requests.charge import Charge
from gateway.requests.times import RequestTimes
from gateway.requests.types import GenerateRequest, TokenUsage

log = structlog.get_logger("gateway")


class RequestRecord(Struct):
    """Facts about one request, updated while it runs."""

    id: str
    request_id: str
    tenant: str
    key_id: str
    model: str
    lane_asked: Lane | None
    lane: Lane | None  # None means that the request was refused before its lane was known.
    times: RequestTimes
    ingress: Ingress = UNKNOWN
    trace_id: str = ""
    """Id of the trace that the caller sent or, set by tracing, that begins at this gateway; empty if there is none."""
    limits_key: str = ""
    """Id of the key under which the limits and use of the caller's key are kept (see `Principal.limits_key`)."""
    base_model: str = ""
    """Name of the base model that serves the request; empty if the request was refused before that was known."""
    adapter: str | None = None
    adapter_hash: str = ""
    prompt_tokens: int = 0
    reserved_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Output tokens that are reasoning, of answers that are complete."""
    n: int = 1
    """Number of answers for each prompt."""
    max_tokens: int = 0
    """Maximum output tokens of an answer."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Output tokens of each answer so far, by the answer's number."""
    cached: dict[int, int] = field(default_factory=dict)
    """Number of tokens of each prompt that were found in the prefix cache, by the prompt's number."""
    device: dict[int, float] = field(default_factory=dict)
    """Device time of each answer in seconds, by the answer's number."""
    proposals: dict[int, tuple[ProposalCount, ...]] = field(default_factory=dict)
    """Numbers of proposed and of accepted speculative tokens of each answer so far, per proposer, by the answer's
    number."""
    finish: str = ""
    """How the request ended: stop, length, cancelled or error; empty while the request runs."""
    status: int = 200
    """HTTP status of the response, for gRPC too; 499 means that the caller disconnected."""
    error_code: str = ""
    error_metadata: Mapping[str, str] = field(default_factory=dict)
    shadowed: tuple[tuple[str, str], ...] = ()
    """Limits in shadow mode that would have refused the request, as pairs of scope kind and name."""
    engine: str = ""
    """Name of the engine that an answer was last sent to; empty where there is only one."""
    routes: list[str] = field(default_factory=list)
    """Why the router chose an engine (see `gateway.routing.router.Reason`), for each answer and move; empty where
    there is only one engine."""
    moves: list[float] = field(default_factory=list)
    """Seconds that an answer was without an engine process, for each move of an answer to another engine process."""
    is_granted: bool = False
    """True means that the limiter admitted the request, which therefore counts in the requests per minute."""
    charge: Charge = Charge.PENDING
    deferred: DeferredUsage | None = None
    """Where the usage of a batch's line is written at its settlement, in place of being counted."""
    suspect: bool = False
    """True means that an engine process of another member of the virtual model ended while it had the request."""
    doubts: int = 0
    """Number of engine processes that ended while they had the request and may have crashed because of it: the maximum
    over its answers. It is set when the request has ended."""
    member: str = ""
    """Member that served the virtual model `model`; empty if that is no virtual model."""
    member_reason: str = ""
    """Why that member served it, in one word."""

    @property
    def served_name(self) -> str:
        """Name of the adapter, or of the base model for a request without one. Limits and usage are counted under
        it."""
        return self.adapter or self.base_model

    @property
    def usage(self) -> TokenUsage:
        accepted, proposed = self.proposed(PREDICTION)
        return TokenUsage(
            self.prompt_tokens,
            self.completion_tokens,
            sum(self.cached.values()),
            round(self.device_seconds * 1e6),
            self.reasoning_tokens,
            accepted,
            proposed - accepted,
        )

    def proposed(self, *proposers: str) -> tuple[int, int]:
        """Return the numbers of accepted and of proposed speculative tokens, summed over all answers, from these
        proposers or, if none is named, from all."""
        counts = [one for of_answer in self.proposals.values() for one in of_answer]
        counts = [one for one in counts if not proposers or one.proposer in proposers]
        return sum(one.accepted for one in counts), sum(one.proposed for one in counts)

    @property
    def used_tokens(self) -> int:
        """Tokens to charge: the prompt and all generated tokens if the charge is due, else 0."""
        return self.prompt_tokens + self.completion_tokens if self.charge is Charge.DUE else 0

    @property
    def device_seconds(self) -> float:
        return sum(self.device.values())

    def counts(self) -> Counts:
        """Return the usage to count so far, which is `NOTHING` unless the charge is due."""
        if self.charge is not Charge.DUE:
            return NOTHING
        used = self.usage
        return Counts(1, used.prompt, used.cached, used.completion, used.device_us)

    @property
    def tpot_seconds(self) -> float | None:
        """Mean seconds per output token after the first (TPOT). None means that there are fewer than two tokens."""
        span = self.times.decode_seconds
        return None if span is None or self.completion_tokens < 2 else span / (self.completion_tokens - 1)

    def submit(self, now: float) -> None:
        """Record that the request is submitted `now`, whether or not an engine takes it at once."""
        self.times.submitted = now

    def fall_due(self) -> None:
        """Charge the request from now on, because an engine or an upstream has it, unless the charge is waived."""
        if self.charge is Charge.PENDING:
            self.charge = Charge.DUE

    def withdraw(self) -> None:
        """Record that the request does not count as submitted, because the limiter did not grant it: work that the
        engine has begun is dropped and not charged."""
        self.times.submitted = None
        if self.charge is Charge.DUE:
            self.charge = Charge.PENDING

    def waive(self) -> None:
        """Charge nothing, now and later."""
        self.charge = Charge.WAIVED

    def note_tokens(self, index: int, count: int) -> None:
        """Add `count` generated tokens to the totals of the request and of the answer with the number `index`."""
        self.completion_tokens += count
        self.lengths[index] = self.lengths.get(index, 0) + count

    def note_event(self, prompt: int, index: int, event: TokenEvent, now: float) -> None:
        """Record what an engine's event, which came `now`, says about the answer `index` to the prompt `prompt`.

        The first event says when the engine began to work on the request and how long it waited for its adapter. Of the
        prompt's tokens in the prefix cache, the least count is kept: it is that of the first answer to run, whose pages
        the other answers then reuse. Of an answer's device time so far, the largest value is kept, because an event
        that ends an answer early does not report the time.
        """
        if (times := self.times).admitted is None:
            times.admitted = now if times.submitted is None else min(now, times.submitted + event.wait)
            times.adapter_wait = event.adapter_wait
        # Without min and max, which take as long as all else here: this runs for each token.
        if event.num_cached < self.cached.get(prompt, sys.maxsize):
            self.cached[prompt] = event.num_cached
        if event.device_seconds > self.device.get(index, -1.0):
            self.device[index] = event.device_seconds
        if event.proposals:
            self.proposals[index] = event.proposals

    def note_move(self, seconds: float) -> None:
        """Record that an answer moved to another engine process, after `seconds` without one."""
        self.moves.append(seconds)

    def end(self, finish: str, status: int, error_code: str = "") -> None:
        self.finish, self.status, self.error_code = finish, status, error_code


def record_error(record: RequestRecord, error: BaseException) -> None:
    """Set the record's finish, status and error code according to an error. An ApiError gives `error` and its own, a
    cancellation or an OSError (the caller has disconnected) `cancelled` and 499, and anything else `error` and 500."""
    if isinstance(error, ApiError):
        record.end("error", error.http_status, error.code or error.fault.name.lower())
        record.error_metadata = error.metadata
    elif isinstance(error, asyncio.CancelledError | GeneratorExit | OSError):
        record.end("cancelled", 499)
    else:
        record.end("error", 500, "internal_error")


@contextmanager
def engine_failures(record: RequestRecord) -> Iterator[None]:
    """Convert an EngineUnavailable that the block raises to ApiError (ENGINE_UNAVAILABLE, or ENGINE_CRASHED if the
    request makes engines crash), and waive the charge."""
    try:
        yield
    except CrashesEngines as error:
        record.waive()
        raise ApiError(Fault.ENGINE_CRASHED, f"{error}; the request is not tried again") from error
    except EngineUnavailable as error:
        record.waive()
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
        record.waive()
    if event.finish_reason is FinishReason.ABORT:
        raise unavailable(Fault.PREEMPTED, "the engine gave the request up, as when its adapter is unloaded")
    if event.refusal is None:
        raise internal(record.request_id)
    if event.refusal.code is ErrorCode.MODEL_OUTPUT_INVALID:
        served = {"model": record.base_model, "adapter": record.adapter, "adapter_version": record.adapter_hash or None}
        log.error("model_output_invalid", **served, request_id=record.request_id, reason=event.refusal.message)
    if event.refusal.code is ErrorCode.INVALID_GRAMMAR:
        field = request.grammar_field
        raise invalid_request(f"{field} cannot be followed: {event.refusal.message}", field)
    fault = Fault[event.refusal.code.name]
    if fault is Fault.MODEL_NOT_FOUND:
        raise model_not_found(record.model)
    raise ApiError(fault, event.refusal.message, retry_after=event.refusal.retry_after)
