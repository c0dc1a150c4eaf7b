"""Interface of request observers, and reports to them about requests that are refused before generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import structlog

from engine.core.messages.requests import Lane
from gateway.core.tenants import Principal
from gateway.core.trace_context import Ingress, new_id
from gateway.requests.record import RequestRecord, record_error
from gateway.requests.times import RequestTimes

log = structlog.get_logger("gateway")


class Observer(Protocol):
    """Receives reports about requests, for metrics, traces or the request log."""

    def inter_token(self, base_model: str, lane: Lane, seconds: float) -> None:
        """Report the inter-token latency of an event that is not its answer's first: the seconds since the previous
        event with tokens, divided by the number of tokens in this one. `base_model` is the name of the base model."""

    def finished(self, record: RequestRecord) -> None:
        """Report a request that has ended. Called exactly once for each request, even one refused before generation."""


class ArrivingRequest:
    """A request for generation before it is passed to `Gateway.generate`; a context manager, see `Gateway.arriving`.

    If its block raises, the request's record with that error is reported to the observers. `Gateway.generate` reports a
    request whose block succeeds.
    """

    def __init__(
        self, request_id: str, ingress: Ingress, observers: Sequence[Observer], clock: Callable[[], float]
    ) -> None:
        """`clock` is the gateway's clock, in seconds; the request arrives now."""
        self.ingress = ingress
        self._request_id = request_id
        self._observers = observers
        self._clock = clock
        self._started = clock()
        self._principal: Principal | None = None

    def identify(self, principal: Principal) -> Principal:
        """Remember the caller, so that a later refusal is recorded under its tenant and key, and return it. Raises
        ApiError: FORBIDDEN, the caller is an administrator."""
        self._principal = principal
        return principal.as_tenant()

    def __enter__(self) -> ArrivingRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            record = self._record()
            record_error(record, error)
            record.times.ended = self._clock()
            notify_observers(self._observers, record)

    def _record(self) -> RequestRecord:
        """Return a new record for a request that is refused before generation; it has no model and no lane."""
        return RequestRecord(
            id=new_id(),
            request_id=self._request_id,
            tenant=self._principal.tenant.name if self._principal else "",
            key_id=self._principal.key_id if self._principal else "",
            limits_key=self._principal.limits_key if self._principal else "",
            model="",
            lane_asked=None,
            lane=None,
            times=RequestTimes(self._started),
            ingress=self.ingress,
            trace_id=self.ingress.trace_id,
        )


def notify_observers(observers: Sequence[Observer], record: RequestRecord) -> None:
    """Report a finished request to all observers. A failing observer is logged, and affects neither the other observers
    nor the answer."""
    for observer in observers:
        try:
            observer.finished(record)
        except Exception:
            log.exception("observer_failed", observer=type(observer).__name__, request_id=record.request_id)
