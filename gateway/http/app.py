"""The ASGI application of a port: all routes that it serves, below what every request passes. They follow OpenAI's API,
and vLLM's where OpenAI has no equivalent."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from gateway.api_schema.status import METRICS, OPENAPI
from gateway.core.part import ApiSurface, serves_path
from gateway.http.cors import Cors
from gateway.http.edge import RequestMiddleware
from gateway.http.openapi.document import document
from gateway.http.openapi.operations import OPERATIONS
from gateway.http.routes.admin.subjects import AdminApi
from gateway.http.routes.batches import BatchesApi
from gateway.http.routes.console import ConsoleFiles
from gateway.http.routes.files import FilesApi
from gateway.http.routes.from_rows import routes_of
from gateway.http.routes.generation import generation_routes
from gateway.http.routes.responses import StoredResponsesApi
from gateway.http.routes.root import RootApi
from gateway.http.routes.scrape import ScrapeApi
from gateway.http.routes.status import StatusApi
from gateway.http.routes.tokens import TokensApi
from gateway.http.settings import PortSettings
from gateway.openai.render import encode_json
from gateway.services import Services


def create_app(services: Services, settings: PortSettings) -> ASGIApp:
    """Create the ASGI application of a port. It has a CORS layer if there are origins and not only administration."""
    surface, origins = settings.surface, settings.cors_origins
    api = HttpApi(services, settings)
    routes = [route for route in api.routes() if serves_path(surface, route.path)]
    router = Router(routes, redirect_slashes=False)  # a redirect would go to the host that the caller named
    edge = RequestMiddleware(router, services.gateway.wire, services.gateway.lifecycle)
    return Cors(edge, origins) if origins and surface != "admin" else edge


def _document(surface: ApiSurface) -> bytes:
    """Return the OpenAPI document of a surface as JSON. It takes some 70 ms to build and 3 ms to encode, and anyone may
    ask for it."""
    return encode_json(document([each for each in OPERATIONS if serves_path(surface, each.path)]))


class HttpApi:
    """All routes of one application, and the handler of its description."""

    def __init__(self, services: Services, settings: PortSettings) -> None:
        self._surface = settings.surface
        self._openapi = b""
        self._building = asyncio.Lock()
        """Held while the document is built. Callers that wait for it go on one after the other."""
        self._generation = generation_routes(services, settings)
        self._scrape = ScrapeApi(services, settings)
        self._parts = (
            StatusApi(services),
            TokensApi(services, settings),
            StoredResponsesApi(services, settings),
            FilesApi(services),
            BatchesApi(services, settings),
            AdminApi(services, settings),
            ConsoleFiles(),
            RootApi(settings),
        )

    def routes(self) -> list[Route]:
        return [
            *self._generation,
            *(route for part in self._parts for route in part.routes()),
            *routes_of({METRICS: self._scrape.metrics, OPENAPI: self.openapi}),
        ]

    async def openapi(self, request: Request) -> Response:
        async with self._building:
            self._openapi = self._openapi or await asyncio.to_thread(_document, self._surface)
        return Response(self._openapi, media_type="application/json")
