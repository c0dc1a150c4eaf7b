"""Who watches requests go by, and what they are told of those that do not get past the door."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import structlog

from engine.core.types import Lane
from gateway.core.request_id import new_id
from gateway.core.tenants import Principal
from gateway.core.trace_context import Ingress
from gateway.failures import note
from gateway.request_record import RequestRecord

log = structlog.get_logger("gateway")


class Observer(Protocol):
    """Watches requests go by: metrics, traces, the request log."""

    def inter_token(self, lane: Lane, seconds: float) -> None:
        """Time between two events with tokens of one answer."""

    def finished(self, record: RequestRecord) -> None:
        """Called exactly once for each request, however it ended, even one that was turned away at the door."""


class Arrival:
    """One request for generation before `Gateway.generate` takes it over."""

    def __init__(self, request_id: str, ingress: Ingress, now: float) -> None:
        self.ingress = ingress
        self._request_id = request_id
        self._started = now
        self._principal: Principal | None = None

    def identify(self, principal: Principal) -> Principal:
        """Whoever is turned away from here on has a name. Raises ApiError: FORBIDDEN, an administrator."""
        self._principal = principal
        return principal.as_tenant()

    def record(self) -> RequestRecord:
        """Of a request that gets no further."""
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
def arriving(
    request_id: str, ingress: Ingress, observers: Sequence[Observer], clock: Callable[[], float]
) -> Iterator[Arrival]:
    """Tells the observers of a request that its body turns away; one that gets through is told of by `generate`."""
    arrival = Arrival(request_id, ingress, clock())
    try:
        yield arrival
    except BaseException as error:
        record = arrival.record()
        note(record, error)
        record.ended = clock()
        tell(observers, record)
        raise


def tell(observers: Sequence[Observer], record: RequestRecord) -> None:
    """One that fails is logged, and keeps neither the others from hearing of it nor the caller from an answer."""
    for observer in observers:
        try:
            observer.finished(record)
        except Exception:
            log.exception("observer_failed", observer=type(observer).__name__, request_id=record.request_id)
