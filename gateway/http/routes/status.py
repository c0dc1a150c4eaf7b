"""The routes for models, health, readiness and the version."""

from __future__ import annotations

from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.adapters.templates import BASE, template_name
from gateway.api_schema import status as api
from gateway.core.routing import ModelQuery
from gateway.core.shared_poll import SharedPoll
from gateway.http.caller import tenant_of
from gateway.http.lists import check_parameters
from gateway.http.routes.from_rows import routes_of
from gateway.http.stream import json_response
from gateway.requests.readiness import readiness
from gateway.requests.served_model import ModelCard
from gateway.services import Services

REDIS_PING_SECONDS = 0.2


class StatusApi:
    """Handlers that say what a gateway serves, and whether it can serve it now. Only tenants may list models."""

    def __init__(self, services: Services) -> None:
        self._gateway = services.gateway
        self._accounts = services.accounts
        self._redis_trouble = SharedPoll(services.gateway.limiter.trouble, REDIS_PING_SECONDS)

    def routes(self) -> list[Route]:
        return routes_of(
            {
                api.LIST_MODELS: self.models,
                api.GET_MODEL: self.model,
                api.HEALTH: self.health,
                api.READY: self.ready,
                api.PING: self.ready,
                api.POST_PING: self.ready,
                api.VERSION: self.version,
            }
        )

    async def models(self, request: Request) -> Response:
        cards = self._gateway.models.cards(tenant_of(self._accounts, request).tenant)
        return json_response(api.Models("list", [_shown_model(card) for card in cards]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        model, adapter = self._gateway.models.resolve(tenant_of(self._accounts, request).tenant, ModelQuery(name))
        return json_response(_shown_model(ModelCard(name, model, adapter)))

    async def health(self, request: Request) -> Response:
        """Return 200 without checking anything: the response itself shows that the process is alive."""
        return json_response(api.Health("ok"))

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
        state = api.Readiness(
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
        return json_response(api.Version(version("loralane")))


def _shown_model(card: ModelCard) -> api.Model:
    """Return a model's entry in OpenAI's model list."""
    info = card.model.engine.info
    return api.Model(
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
