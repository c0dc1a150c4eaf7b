"""The HTTP API for batches, following OpenAI's: /v1/batches."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.api_schema import batches as api
from gateway.batches.record import Batch, shown_batch
from gateway.batches.service import BatchRequest
from gateway.core.tenants import Principal
from gateway.http.body import read_body
from gateway.http.caller import tenant_of
from gateway.http.lists import parse_number
from gateway.http.routes.from_rows import routes_of
from gateway.http.settings import PortSettings
from gateway.http.stream import json_response
from gateway.openai.parse import parse
from gateway.openai.render import list_page
from gateway.services import Services


class BatchesApi:
    """Handlers for batches. Only tenants can call them, each for its own batches."""

    def __init__(self, services: Services, settings: PortSettings) -> None:
        self._batches = services.batches
        self._etas = services.etas
        self._accounts = services.accounts
        self._max_body_bytes = settings.max_control_bytes

    def routes(self) -> list[Route]:
        return routes_of({api.CREATE: self.create, api.LIST: self.list, api.GET: self.show, api.CANCEL: self.cancel})

    async def create(self, request: Request) -> Response:
        principal = self._tenant(request)
        body = parse(await read_body(request, self._max_body_bytes), api.BatchBody)
        return json_response(await self._shown(await self._batches.create(principal, _wanted(body))))

    async def list(self, request: Request) -> Response:
        principal, given = self._tenant(request), request.query_params
        limit = parse_number(given.get("limit", str(api.DEFAULT_PAGE)), "limit", 1, api.MAX_PAGE)
        found, has_more = await self._batches.list(principal, given.get("after"), limit)
        return json_response(list_page([await self._shown(batch) for batch in found], has_more))

    async def show(self, request: Request) -> Response:
        principal = self._tenant(request)
        return json_response(await self._shown(await self._batches.get(principal, request.path_params["batch_id"])))

    async def cancel(self, request: Request) -> Response:
        principal = self._tenant(request)
        return json_response(await self._shown(await self._batches.cancel(principal, request.path_params["batch_id"])))

    async def _shown(self, batch: Batch) -> dict[str, Any]:
        shown: dict[str, Any] = msgspec.to_builtins(shown_batch(batch, await self._etas.eta(batch)))
        return shown

    def _tenant(self, request: Request) -> Principal:
        return tenant_of(self._accounts, request)


def _wanted(body: api.BatchBody) -> BatchRequest:
    seconds = body.output_expires_after.seconds if body.output_expires_after else None
    return BatchRequest(body.endpoint, body.input_file_id, body.completion_window, body.metadata, seconds)
