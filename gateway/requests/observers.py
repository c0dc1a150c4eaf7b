"""Interface of request observers, and reports to them about requests that are refused before generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import structlog

from engine.core.types import Lane
from gateway.core.tenants import Principal
from gateway.core.trace_context import Ingress, new_id
from gateway.requests.record import RequestRecord, record_error

log = structlog.get_logger("gateway")


class Observer(Protocol):
    """Observes requests: metrics, traces, the request log."""

    def inter_token(self, lane: Lane, seconds: float) -> None:
        """Report the seconds between two consecutive token events of one answer."""

    def finished(self, record: RequestRecord) -> None:
        """Report a request that has ended. Called exactly once for each request, even one refused before generation."""


class ArrivingRequest:
    """A request for generation, before `Gateway.generate` takes it over."""

    def __init__(self, request_id: str, ingress: Ingress, now: float) -> None:
        self.ingress = ingress
        self._request_id = request_id
        self._started = now
        self._principal: Principal | None = None

    def identify(self, principal: Principal) -> Principal:
        """Remember the caller, so that a later refusal is recorded under its tenant and key.

        Raises:
            ApiError: FORBIDDEN, the caller is an administrator.
        """
        self._principal = principal
        return principal.as_tenant()

    def record(self) -> RequestRecord:
        """Return the record of a request that is refused here."""
        return RequestRecord(
            id=new_id(),
            request_id=self._request_id,
            tenant=self._principal.tenant.name if self._principal else "",
            key_id=self._principal.key_id if self._principal else "",
            model="",
            lane_asked=None,
            lane=None,
            started=self._started,
            ingress=self.ingress,
            trace_id=self.ingress.trace_id,
        )


@contextmanager
def observe_arrival(
    request_id: str, ingress: Ingress, observers: Sequence[Observer], clock: Callable[[], float]
) -> Iterator[ArrivingRequest]:
    """Report a request to the observers if the body refuses it. `generate` reports a request that gets through."""
    arrival = ArrivingRequest(request_id, ingress, clock())
    try:
        yield arrival
    except BaseException as error:
        record = arrival.record()
        record_error(record, error)
        record.ended = clock()
        notify_observers(observers, record)
        raise


def notify_observers(observers: Sequence[Observer], record: RequestRecord) -> None:
    """Report a finished request to all observers. A failing observer is logged, and affects neither the other observers
    nor the answer."""
    for observer in observers:
        try:
            observer.finished(record)
        except Exception:
            log.exception("observer_failed", observer=type(observer).__name__, request_id=record.request_id)
