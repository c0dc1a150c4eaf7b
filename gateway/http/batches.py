"""The HTTP API for batches, following OpenAI's: /v1/batches."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.batches.record import Batch, batch_json
from gateway.batches.service import DEFAULT_PAGE, MAX_PAGE, BatchRequest
from gateway.core.tenants import Principal
from gateway.http.edge import read_body, tenant_of
from gateway.http.lists import parse_number
from gateway.http.settings import PortSettings
from gateway.http.stream import json_response
from gateway.openai.parse import parse
from gateway.openai.render import list_page
from gateway.services import Services

BATCHES = "/v1/batches"
BATCH = BATCHES + "/{batch_id}"
CANCEL = BATCH + "/cancel"


class OutputExpiry(Struct):
    """Lifetime of the output files that a batch writes."""

    anchor: Literal["created_at"]
    """The time from which `seconds` counts: the creation of each output file, not of the batch."""
    seconds: int


class BatchBody(Struct, kw_only=True):
    """Body of POST /v1/batches."""

    endpoint: str
    input_file_id: str
    completion_window: str
    """Time in which the batch must end, as a duration such as 24h, 90s, 30m or 7d."""
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None

    def batch_request(self) -> BatchRequest:
        seconds = self.output_expires_after.seconds if self.output_expires_after else None
        return BatchRequest(self.endpoint, self.input_file_id, self.completion_window, self.metadata, seconds)


class BatchesApi:
    """Handlers for batches. Only tenants can call them, each for its own batches."""

    def __init__(self, services: Services, settings: PortSettings) -> None:
        self._batches = services.batches
        self._etas = services.etas
        self._accounts = services.accounts
        self._max_body_bytes = settings.max_control_bytes

    def routes(self) -> list[Route]:
        return [
            Route(BATCHES, self.create, methods=["POST"]),
            Route(BATCHES, self.list, methods=["GET"]),
            Route(BATCH, self.show, methods=["GET"]),
            Route(CANCEL, self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        principal = self._tenant(request)
        body = parse(await read_body(request, self._max_body_bytes), BatchBody)
        return json_response(await self._shown(await self._batches.create(principal, body.batch_request())))

    async def list(self, request: Request) -> Response:
        principal, given = self._tenant(request), request.query_params
        limit = parse_number(given.get("limit", str(DEFAULT_PAGE)), "limit", 1, MAX_PAGE)
        found, has_more = await self._batches.list(principal, given.get("after"), limit)
        return json_response(list_page([await self._shown(batch) for batch in found], has_more))

    async def show(self, request: Request) -> Response:
        principal = self._tenant(request)
        return json_response(await self._shown(await self._batches.get(principal, request.path_params["batch_id"])))

    async def cancel(self, request: Request) -> Response:
        principal = self._tenant(request)
        return json_response(await self._shown(await self._batches.cancel(principal, request.path_params["batch_id"])))

    async def _shown(self, batch: Batch) -> dict[str, Any]:
        return {**batch_json(batch), "eta_seconds": await self._etas.eta(batch)}

    def _tenant(self, request: Request) -> Principal:
        return tenant_of(self._accounts, request)
