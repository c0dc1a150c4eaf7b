"""What the way of a request asks of others: the interface of engines and upstreams, which compute the answers, and that
of the observers of requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import NamedTuple, Protocol

from msgspec import Struct

from engine.core.messages.requests import Lane
from gateway.core.estimate import OutputAverages
from gateway.core.tenants import Tenant
from gateway.requests.deadlines import Timer
from gateway.requests.record import RequestRecord
from gateway.requests.settings import ServiceSettings
from gateway.requests.types import Admitted, GenerateRequest, GenerationChunk


class Observer(Protocol):
    """Receives reports about requests, for metrics, traces or the request log."""

    def inter_token(self, base_model: str, lane: Lane, seconds: float) -> None:
        """Report the inter-token latency of an event that is not its answer's first: the seconds since the previous
        event with tokens, divided by the number of tokens in this one. `base_model` is the name of the base model."""

    def finished(self, record: RequestRecord) -> None:
        """Report a request that has ended. Called exactly once for each request, even one refused before generation."""


class Instruments(NamedTuple):
    """What all requests of a gateway share."""

    settings: ServiceSettings
    observers: Sequence[Observer]
    clock: Callable[[], float]
    """Returns monotonic seconds."""
    outputs: OutputAverages
    """Average length of answers."""


class NeededTokens(NamedTuple):
    """Tokens to reserve for a run."""

    tokens: int
    least: int | None
    """Minimum of tokens if `tokens` is a guess; None means that it is none (see `ReserveRequest`)."""


class RunTerms(Struct, frozen=True):
    """How a run of a request is limited, charged and awaited. The defaults are those of a request that names its model
    itself; a run of a virtual model's member may have others."""

    engine_wait: float | None = None
    """Seconds that the run waits for an engine before its first token. None means as long as the settings say."""
    reserved_runs: int = 1
    """Number of runs to reserve tokens for: this one and those that may follow it, each as large as this one, so that
    they fit the limits."""
    is_counted: bool = False
    """True means that this run does not count in the requests per minute of the caller's tenant and key, because an
    earlier one does."""
    is_charged: bool = True
    """False means that the run is a shadow copy, which no tenant asked for: it is not limited, charged or counted in
    usage."""


ORDINARY = RunTerms()
"""The terms of a request that names its model itself."""


class Run(Protocol):
    """A request that its backend has prepared, so that it needs only a reservation to run."""

    @property
    def needed(self) -> NeededTokens: ...

    def held(self) -> AbstractAsyncContextManager[object]:
        """Return a context manager that frees, on exit, all that the run holds, and aborts answers that have not
        ended."""

    def begin(self) -> object:
        """Begin to compute if that is possible before the reservation is granted. Otherwise `chunks` begins."""

    def chunks(self, timer: Timer) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the chunks of all answers as they come, and update the record; the very last carries the usage. Report
        progress to the timer. Raises ApiError, having waived the charge where the backend failed or refused."""

    def admitted(self, headers: Mapping[str, str]) -> Admitted:
        """Return what the caller learns before the first token. `headers` are those of the limits."""


class Backend(Protocol):
    """What computes the answers to one request."""

    @property
    def name(self) -> str:
        """Return the name of the base model or of the upstream."""

    @property
    def adapter_name(self) -> str | None:
        """Return the name of the adapter; None means that there is none."""

    def place(self, tenant: Tenant, lane: Lane, request: GenerateRequest) -> AbstractContextManager[None]:
        """Return a context manager during whose block the request's answers have a place in the lane. Raises ApiError:
        LANE_QUEUE_FULL, on entry."""

    def check(self, tenant: Tenant, request: GenerateRequest) -> None:
        """Check what takes no tokenizing. Raises ApiError: INVALID_REQUEST, UNSUPPORTED_PARAMETER, and those that say
        that the backend takes no request now."""

    async def prepare(
        self, tenant: Tenant, lane: Lane, request: GenerateRequest, record: RequestRecord, engine_wait: float | None
    ) -> Run:
        """Count the tokens of a request that `check` has passed, and return what runs it. `engine_wait` is that of
        `RunTerms`."""
