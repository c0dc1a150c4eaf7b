"""Routes and handlers of the HTTP API. They follow OpenAI's API, and vLLM's where OpenAI has no equivalent."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from gateway.adapters.templates import BASE, template_name
from gateway.api import status as rows
from gateway.core.part import ApiSurface, serves_path
from gateway.core.routing import ModelQuery
from gateway.core.shared_poll import SharedPoll
from gateway.http.admin import AdminApi
from gateway.http.batches import BatchesApi
from gateway.http.caller import tenant_of
from gateway.http.console import ConsoleFiles
from gateway.http.cors import Cors
from gateway.http.edge import RequestMiddleware
from gateway.http.files import FilesApi
from gateway.http.generation import generation_routes
from gateway.http.lists import check_parameters
from gateway.http.openapi.document import document
from gateway.http.openapi.operations import OPERATIONS
from gateway.http.responses import StoredResponsesApi
from gateway.http.root import RootApi
from gateway.http.rows import routes_of
from gateway.http.scrape import ScrapeApi
from gateway.http.settings import PortSettings
from gateway.http.stream import json_response
from gateway.http.tokens import TokensApi
from gateway.openai.render import encode_json
from gateway.requests.readiness import readiness
from gateway.requests.served_model import ModelCard
from gateway.services import Services

REDIS_PING_SECONDS = 0.2


def create_app(services: Services, settings: PortSettings) -> ASGIApp:
    """Create the ASGI application of a port. It has a CORS layer if there are origins and not only administration."""
    surface, origins = settings.surface, settings.cors_origins
    api = HttpApi(services, settings)
    routes = [route for route in api.routes() if serves_path(surface, route.path)]
    router = Router(routes, redirect_slashes=False)  # a redirect would go to the host that the caller named
    edge = RequestMiddleware(router, services.gateway.wire, services.gateway.lifecycle)
    return Cors(edge, origins) if origins and surface != "admin" else edge


@cache
def _document(surface: ApiSurface) -> bytes:
    """Return the OpenAPI document of a surface as JSON. It takes some 70 ms to build and 3 ms to encode, and anyone may
    ask for it."""
    return encode_json(document([each for each in OPERATIONS if serves_path(surface, each.path)]))


class HttpApi:
    """Handlers and routes of one application."""

    def __init__(self, services: Services, settings: PortSettings) -> None:
        gateway = services.gateway
        self._gateway = gateway
        self._accounts = services.accounts
        self._surface = settings.surface
        self._openapi = b""
        self._redis_trouble = SharedPoll(gateway.limiter.trouble, REDIS_PING_SECONDS)
        self._generation = generation_routes(services, settings)
        self._scrape = ScrapeApi(services, settings)
        self._parts = (
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
            *routes_of({rows.LIST_MODELS: self.models, rows.GET_MODEL: self.model}),
            *(route for part in self._parts for route in part.routes()),
            *routes_of(
                {
                    rows.HEALTH: self.health,
                    rows.READY: self.ready,
                    rows.PING: self.ready,
                    rows.POST_PING: self.ready,
                    rows.VERSION: self.version,
                    rows.METRICS: self._scrape.metrics,
                    rows.OPENAPI: self.openapi,
                }
            ),
        ]

    async def models(self, request: Request) -> Response:
        cards = self._gateway.models.cards(tenant_of(self._accounts, request).tenant)
        return json_response(rows.Models("list", [_shown_model(card) for card in cards]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        model, adapter = self._gateway.models.resolve(tenant_of(self._accounts, request).tenant, ModelQuery(name))
        return json_response(_shown_model(ModelCard(name, model, adapter)))

    async def health(self, request: Request) -> Response:
        """Return 200 without checking anything: the response itself shows that the process is alive."""
        return json_response(rows.Health("ok"))

    async def ready(self, request: Request) -> Response:
        """Return 200 if requests for at least one base model can be served: status `ready`, or `degraded` if the engine
        of another one is not connected or hangs. Otherwise return 503, also if Redis is away and all limits' policy is
        `closed`, and once the gateway drains. With the query parameter `model`, only that base model counts.

        The body has the reason, and the state of each base model, of Redis, which is probed at most every
        REDIS_PING_SECONDS, because anyone may ask, and of the limiter. The reason also warns of a Redis that may evict
        keys, without a change of the status. Raises
        ApiError: MODEL_NOT_FOUND, there is no such base model; INVALID_REQUEST, another parameter is given.
        """
        check_parameters(request.query_params, "model")
        limiter = self._gateway.limiter
        trouble = await self._redis_trouble.get()
        warning = trouble or await limiter.warning()
        is_draining = self._gateway.lifecycle.is_draining
        model = request.query_params.get("model", "")
        found = readiness(self._gateway.models, limiter, model, draining=is_draining)
        state = rows.Readiness(
            status=found.status,
            reason="; ".join(filter(None, (found.reason, warning and f"Redis: {warning}"))) or None,
            engine=found.engines,
            models={name: trouble or None for name, trouble in found.troubles.items()},
            redis=not trouble,
            limiter=limiter.mode,
            limiter_modes=sorted(limiter.modes),
        )
        return json_response(state, 200 if found.serves else 503)

    async def version(self, request: Request) -> Response:
        return json_response(rows.Version(version("loralane")))

    async def openapi(self, request: Request) -> Response:
        self._openapi = self._openapi or await asyncio.to_thread(_document, self._surface)
        return Response(self._openapi, media_type="application/json")


def _shown_model(card: ModelCard) -> rows.Model:
    """Return a model's entry in OpenAI's model list."""
    info = card.model.engine.info
    return rows.Model(
        id=card.name,
        object="model",
        created=card.created,
        owned_by="loralane",
        root=card.root,
        parent=card.parent,
        max_model_len=info.max_model_len,
        weights=info.weights,
        default_sampling_params=dict(card.model.intake.sampling_defaults),
        chat_template=template_name(card.adapter) if card.adapter else BASE,
    )
