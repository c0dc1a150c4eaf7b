"""When a request got how far."""

from __future__ import annotations

from msgspec import Struct


class RequestTimes(Struct):
    """When a request got how far, in seconds on the gateway's monotonic clock. None means that it has not got that
    far."""

    started: float
    """When the caller's request arrived."""
    reserving: float | None = None
    """When the limiter was asked for the reservation."""
    reserved: float | None = None
    """When the limiter answered."""
    submitted: float | None = None
    """When the request was submitted to the engine."""
    adapter_wait: float = 0.0
    """Seconds from `submitted` until the adapter was in host memory."""
    admitted: float | None = None
    """When the engine began to work on the request, which is long before the first event: that comes at the end of a
    step."""
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None

    @property
    def reserve_seconds(self) -> float | None:
        return _span(self.reserving, self.reserved)

    @property
    def queue_seconds(self) -> float | None:
        """Seconds from submission until the engine began to work on the request. None means that it has not begun."""
        return _span(self.submitted, self.admitted)

    @property
    def ttft_seconds(self) -> float | None:
        return _span(self.started, self.first_token)

    @property
    def prefill_seconds(self) -> float | None:
        """Seconds from when the engine began to work on the request to the first token; None before that."""
        return _span(self.admitted, self.first_token)

    @property
    def decode_seconds(self) -> float | None:
        """Seconds from the first token to the last so far. None means that no token has come."""
        return _span(self.first_token, self.last_token)

    @property
    def inference_seconds(self) -> float | None:
        """Seconds from when the engine began to work on the request to the last token so far; None before the first."""
        return _span(self.admitted, self.last_token)

    @property
    def duration_seconds(self) -> float | None:
        return _span(self.started, self.ended)


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
