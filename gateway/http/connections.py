"""Refuses HTTP connections for which this process has no descriptors left."""

from __future__ import annotations

import asyncio
import time

import structlog

from gateway.core.file_descriptors import http_descriptors
from gateway.http.guard import GuardedProtocol

log = structlog.get_logger("http")

LOG_SECONDS = 10.0
"""Seconds between two log lines about refused connections, which may be thousands a second."""


class RefusalLog:
    """Logs refused connections: at most one line every LOG_SECONDS, with their number since the last line."""

    def __init__(self) -> None:
        self._refused = 0
        self._logged = -LOG_SECONDS

    def count(self) -> None:
        self._refused += 1
        now = time.monotonic()
        if now - self._logged >= LOG_SECONDS:
            log.warning("connections_refused", connections=self._refused, reason="too few file descriptors are left")
            self._refused, self._logged = 0, now


class BoundedProtocol(GuardedProtocol):
    """`GuardedProtocol` that closes a new connection at once if its descriptor's number is `most_descriptors` or more:
    the process then has as many descriptors and keeps the rest for itself."""

    refusals = RefusalLog()
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if transport.get_extra_info("socket").fileno() >= http_descriptors():
            self._is_refused = True
            self.refusals.count()
            transport.abort()
        else:
            super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)

    def eof_received(self) -> None:
        if not self._is_refused:
            super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_refused:
            super().connection_lost(exc)
