"""GET /metrics: who may read it, and how much of it."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from engine.arrivals import EngineUnavailable
from gateway.core.tenants import Principal, hash_key
from gateway.http.edge import bearer_token
from gateway.observe.metrics import CONTENT_TYPE, Metrics
from gateway.service import Gateway

Openness = bool | Literal["no_tenants"]


class ScrapeApi:
    """The handler of /metrics."""

    def __init__(
        self,
        gateway: Gateway,
        metrics: Metrics,
        authenticate: Callable[[Request], Principal],
        keys: Collection[str],
        openness: Openness,
    ) -> None:
        """
        Args:
            keys: SHA-256 of keys that may read everything, beside administrators'.
            openness: what a request without a key reads: everything (True), nothing (False), or everything but tenants.
        """
        self._gateway = gateway
        self._metrics = metrics
        self._authenticate = authenticate
        self._keys = keys
        self._openness = openness

    async def metrics(self, request: Request) -> Response:
        """Raises ApiError: UNAUTHENTICATED or FORBIDDEN, a key that may not read this."""
        tenants = self._may_read_tenants(request)
        engine = self._gateway.engine
        try:
            stats = await engine.stats() if engine.ready else None
        except EngineUnavailable:
            stats = None
        names, modes = self._gateway.adapters.names, self._gateway.limiter.modes
        return Response(self._metrics.render(stats, names, modes, tenants=tenants), media_type=CONTENT_TYPE)

    def _may_read_tenants(self, request: Request) -> bool:
        if self._openness is True:
            return True
        token = bearer_token(request)
        if token is None and self._openness == "no_tenants":
            return False
        shown = hash_key(token or "")
        if not any(hmac.compare_digest(shown, known) for known in self._keys):
            self._authenticate(request).as_admin()
        return True
