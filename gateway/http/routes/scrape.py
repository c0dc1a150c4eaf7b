"""GET /metrics, and which callers may read which part of it."""

from __future__ import annotations

import asyncio
import hmac
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from engine.rpc.stream import EngineUnavailable
from gateway.core.shared_poll import SharedPoll
from gateway.core.tenants import hash_key
from gateway.http.caller import api_key, authenticate
from gateway.http.settings import PortSettings
from gateway.observe.engine_metrics import EngineSnapshot
from gateway.observe.metrics import CONTENT_TYPE
from gateway.requests.served_model import ServedModel
from gateway.services import Services


class ScrapeApi:
    """Handler of GET /metrics, which also decides what a caller may read."""

    def __init__(self, services: Services, settings: PortSettings) -> None:
        self._gateway = services.gateway
        self._metrics = services.metrics
        self._accounts = services.accounts
        self._keys = settings.metrics_keys
        self._openness = settings.open_metrics
        self._for_strangers = SharedPoll(partial(self._text, settings.open_metrics is True))
        """The metrics for callers without a key, rendered at most once a second: that takes tens of milliseconds."""

    async def metrics(self, request: Request) -> Response:
        """Return the metrics as Prometheus text, without tenants' metrics if the caller may not read those. If an
        engine is not available, its state is missing. Raises ApiError: INVALID_API_KEY, the key is missing or not
        valid; FORBIDDEN, it is a tenant's."""
        tenants = self._may_read_tenants(request)
        strangers = self._openness is True or api_key(request) is None  # any key will do where none is needed
        text = await (self._for_strangers.get() if strangers else self._text(tenants))
        return Response(text, media_type=CONTENT_TYPE)

    async def _text(self, tenants: bool) -> bytes:
        engines = await asyncio.gather(*map(_snapshot, self._gateway.models))
        return self._metrics.render(engines, self._gateway.limiter.modes, tenants=tenants)

    def _may_read_tenants(self, request: Request) -> bool:
        """Return whether the caller may read tenants' metrics. Raises ApiError if it may read no metrics at all, as
        with any wrong key unless everything is open."""
        if self._openness is True:
            return True
        token = api_key(request)
        if token is None and self._openness == "no_tenants":
            return False
        shown = hash_key(token or "")
        if not any(hmac.compare_digest(shown, known) for known in self._keys):
            authenticate(self._accounts, request).as_admin()
        return True


async def _snapshot(model: ServedModel) -> EngineSnapshot:
    """Return the state of a model's engine, without statistics if the engine is not available."""
    try:
        stats = await model.engine.stats() if model.engine.ready else None
    except EngineUnavailable:
        stats = None
    return EngineSnapshot(model.name, model.engine.info, stats, model.adapters.names)
