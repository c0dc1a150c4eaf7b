"""Routes and handlers of the HTTP API. They follow OpenAI's API, and vLLM's where OpenAI has no equivalent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib.metadata import version
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from gateway.accounts.registry import AccountRegistry
from gateway.adapters.templates import BASE, template_name
from gateway.anthropic.calls import message_call
from gateway.batches.eta import EtaEstimator
from gateway.batches.service import Batches
from gateway.core.limits import EACH
from gateway.core.part import ApiSurface, serves_path
from gateway.core.routing import ModelQuery
from gateway.core.shared_poll import SharedPoll
from gateway.core.tenants import Authenticator, Principal, Tenant
from gateway.core.trace_context import Ingress, session_from, trace_context_from
from gateway.embeddings.calls import PooledCall, embeddings_call, rerank_call, score_call
from gateway.files.service import Files
from gateway.http.admin import AdminApi
from gateway.http.admin_batches import AdminBatchesApi
from gateway.http.batches import BatchesApi
from gateway.http.console import ConsoleFiles
from gateway.http.cors import Cors
from gateway.http.edge import (
    AsgiEndpoint,
    RequestMiddleware,
    api_key,
    has_long_body,
    header,
    hold_of,
    read_body,
    request_id,
)
from gateway.http.files import FilesApi
from gateway.http.invocations import invocation_call
from gateway.http.lists import check_parameters
from gateway.http.openapi.document import document
from gateway.http.openapi.operations import OPERATIONS
from gateway.http.responses import RESPONSES, FeedResponse, OwnNames, StoredResponsesApi
from gateway.http.root import GrpcAddressOf, RootApi
from gateway.http.scrape import MetricsAccess, ScrapeApi
from gateway.http.stream import GenerationCall, GenerationResponse, WholeCall, WholeResponse, json_response
from gateway.http.time_limits import with_time_limits
from gateway.http.tokens import TokensApi
from gateway.limiter.base import ReserveRequest
from gateway.observe.metrics import Metrics
from gateway.observe.operations import Operations
from gateway.openai.calls import chat_call, completion_call
from gateway.openai.render import Json, encode_json
from gateway.requests.observers import ArrivingRequest
from gateway.requests.readiness import readiness
from gateway.requests.served_model import ModelCard
from gateway.requests.service import Gateway
from gateway.responses.calls import stateless_call
from gateway.responses.service import Responses
from gateway.usage.report import UsageAdmin

MAX_BODY_BYTES = 8 * 2**20
MAX_CONTROL_BYTES = 512 * 1024
"""Maximum size of a body that asks for a batch or administers something. Such bodies are parsed on the event loop,
which takes 15 ms at worst; one that names 10,000 tenants has 200 kB."""
PING_SECONDS = 10.0
REDIS_PING_SECONDS = 0.2
RERANK = ("/v1/rerank", "/rerank", "/v2/rerank")
"""Paths of one endpoint: Jina's and the two that vLLM and Cohere's clients use besides."""

Call = TypeVar("Call", bound=WholeCall)
Parser = Callable[[Gateway, Tenant, bytes, str, Ingress], Call]
"""Function that parses the body of a request to one of the API's routes. Its arguments are the gateway, the tenant, the
body, the request id and the ingress."""
Understanding = Callable[[Tenant, bytes, str, Ingress], Awaitable[Call]]
"""Asynchronous parser of a request's body that is bound to a gateway and may read stored data of the tenant."""


def create_app(
    gateway: Gateway,
    keys: Authenticator,
    *,
    metrics: Metrics,
    accounts: AccountRegistry | None = None,
    operations: Operations | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    ping_seconds: float = PING_SECONDS,
    usage: UsageAdmin | None = None,
    metrics_keys: Collection[str] = (),
    open_metrics: MetricsAccess = False,
    files: Files | None = None,
    batches: Batches | None = None,
    responses: Responses | None = None,
    surface: ApiSurface = "all",
    cors_origins: Sequence[str] = (),
    grpc: GrpcAddressOf = lambda: None,
) -> ASGIApp:
    """Create the ASGI application.

    Args:
        gateway: serves the requests.
        keys: authenticates callers.
        metrics: the source of /metrics.
        accounts: the tenants and keys. None means that there are no routes to administer them.
        operations: the lanes, the live and recent requests, and history. None means that there are no routes for them
            or for the overview.
        max_body_bytes: maximum size of a request body, except for file uploads. Bodies for batches and administration
            may have at most MAX_CONTROL_BYTES.
        ping_seconds: interval of the pings in an event stream.
        usage: the usage reports. None means that there is no route for them.
        metrics_keys: SHA-256 of the keys that may read /metrics, besides administrators' keys.
        open_metrics: what a request without a key may read of /metrics: everything (True: keys are not checked at
            all), nothing (False), or all but tenants' metrics ("no_tenants").
        files, batches: the file and batch services. None means that there are no routes for them.
        responses: stores and reads responses. None means that requests for that are refused.
        surface: the part of the API that this port serves: all, public (all but administration) or admin.
        cors_origins: origins whose pages may call everything but administration. If empty, or if the surface is admin,
            no CORS layer is added.
        grpc: returns the address of the gRPC server, for `GET /`; None means that there is none.
    """
    rest = (accounts, operations, usage, metrics_keys, open_metrics, files, batches, responses, surface, grpc)
    api = HttpApi(gateway, keys, metrics, max_body_bytes, ping_seconds, *rest)
    routes = [route for route in api.routes() if serves_path(surface, route.path)]
    router = Router(routes, redirect_slashes=False)  # a redirect would go to the host that the caller named
    edge = RequestMiddleware(router, gateway.wire)
    return Cors(edge, cors_origins) if cors_origins and surface != "admin" else edge


@cache
def _document(surface: ApiSurface) -> bytes:
    """Return the OpenAPI document of a surface as JSON. It takes some 70 ms to build and 3 ms to encode, and anyone may
    ask for it."""
    return encode_json(document([each for each in OPERATIONS if serves_path(surface, each.path)]))


class HttpApi:
    """Handlers and routes of one application. `create_app` creates it and describes the arguments."""

    def __init__(
        self,
        gateway: Gateway,
        keys: Authenticator,
        metrics: Metrics,
        max_body_bytes: int,
        ping_seconds: float,
        accounts: AccountRegistry | None,
        operations: Operations | None,
        usage: UsageAdmin | None,
        metrics_keys: Collection[str],
        open_metrics: MetricsAccess,
        files: Files | None,
        batches: Batches | None,
        responses: Responses | None,
        surface: ApiSurface,
        grpc: GrpcAddressOf,
    ) -> None:
        self._gateway = gateway
        self._root = RootApi(surface, grpc)
        self._keys = keys
        self._scrape = ScrapeApi(gateway, metrics, self._authenticate, metrics_keys, open_metrics)
        self._max_body_bytes = max_body_bytes
        self._tokens = TokensApi(gateway, self._tenant, max_body_bytes)
        self._ping_seconds = ping_seconds
        self._surface = surface
        self._openapi = b""
        self._redis_trouble = SharedPoll(gateway.limiter.trouble, REDIS_PING_SECONDS)
        self._files = FilesApi(files, self._authenticate) if files else None
        self._responses = responses
        self._understand_response = partial(responses.call, gateway) if responses else self._at_once(stateless_call)
        self._stored = StoredResponsesApi(gateway, responses, self._authenticate, ping_seconds) if responses else None
        etas = EtaEstimator(batches, gateway) if batches else None
        most = min(max_body_bytes, MAX_CONTROL_BYTES)
        self._batches = BatchesApi(batches, etas, self._authenticate, most) if batches and etas else None
        of_all = AdminBatchesApi(batches, etas) if batches and etas else None
        self._admin = AdminApi(gateway, self._authenticate, most, accounts, usage, operations, of_all)

    def routes(self) -> list[Route]:
        post, get = ["POST"], ["GET"]
        return [
            Route("/v1/chat/completions", AsgiEndpoint(self.chat), methods=post),
            Route("/v1/completions", AsgiEndpoint(self.completions), methods=post),
            Route(RESPONSES, AsgiEndpoint(self.response), methods=post),
            Route("/v1/messages", AsgiEndpoint(self.message), methods=post),
            Route("/v1/embeddings", AsgiEndpoint(self.embeddings), methods=post),
            *(Route(path, AsgiEndpoint(self.rerank), methods=post) for path in RERANK),
            Route("/v1/score", AsgiEndpoint(self.score), methods=post),
            Route("/score", AsgiEndpoint(self.score), methods=post),
            Route("/invocations", AsgiEndpoint(self.invocation), methods=post),
            Route("/v1/models", self.models, methods=get),
            Route("/v1/models/{name:path}", self.model, methods=get),
            *self._tokens.routes(),
            *(self._stored.routes() if self._stored else ()),
            *(self._files.routes() if self._files else ()),
            *(self._batches.routes() if self._batches else ()),
            *self._admin.routes(),
            *ConsoleFiles().routes(),
            *self._root.routes(),
            Route("/health", self.health, methods=get),
            Route("/ready", self.ready, methods=get),
            Route("/ping", self.ready, methods=[*get, *post]),
            Route("/version", self.version, methods=get),
            Route("/metrics", self._scrape.metrics, methods=get),
            Route("/openapi.json", self.openapi, methods=get),
        ]

    async def chat(self, request: Request) -> GenerationResponse:
        return await self._generation(request, chat_call)

    async def completions(self, request: Request) -> GenerationResponse:
        return await self._generation(request, completion_call)

    async def response(self, request: Request) -> ASGIApp:
        """Handle POST /v1/responses: answer with a generation or, for a background request, with the queued response
        object, or with the stream of its events."""
        with self._arriving(request) as arrival:
            call, whole = await self._understood(request, arrival, self._understand_response)
            if call.in_background and self._responses is not None:
                queued, feed = await self._responses.begin(self._gateway, whole.principal, call, whole.request)
                return FeedResponse(feed, self._ping_seconds) if call.stream else json_response(queued)
        return OwnNames(GenerationResponse(whole, call, self._ping_seconds))

    async def message(self, request: Request) -> GenerationResponse:
        return await self._generation(request, message_call)

    async def embeddings(self, request: Request) -> WholeResponse:
        return (await self._begun(request, embeddings_call))[1]

    async def rerank(self, request: Request) -> WholeResponse:
        return (await self._begun(request, rerank_call))[1]

    async def score(self, request: Request) -> WholeResponse:
        return (await self._begun(request, score_call))[1]

    async def invocation(self, request: Request) -> GenerationResponse | WholeResponse:
        """Handle POST /invocations, where SageMaker sends every request: the fields of the body say what it is."""
        call, whole = await self._begun(request, invocation_call)
        return whole if isinstance(call, PooledCall) else GenerationResponse(whole, call, self._ping_seconds)

    async def models(self, request: Request) -> Response:
        cards = self._gateway.models.cards(self._tenant(request).tenant)
        return json_response({"object": "list", "data": [self._model(card) for card in cards]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        model, adapter = self._gateway.models.resolve(self._tenant(request).tenant, ModelQuery(name))
        return json_response(self._model(ModelCard(name, model, adapter)))

    async def health(self, request: Request) -> Response:
        """Return 200 without checking anything: the response itself shows that the process is alive."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Return 200 if requests for at least one base model can be served: status `ready`, or `degraded` if the engine
        of another one is not connected or hangs. Otherwise return 503, also if Redis is away and all limits' policy is
        `closed`. With the query parameter `model`, only that base model counts.

        The body has the reason, and the state of each base model, of Redis, which is probed at most every
        REDIS_PING_SECONDS, because anyone may ask, and of the limiter. The reason also warns of a Redis that may evict
        keys, without a change of the status. Raises
        ApiError: MODEL_NOT_FOUND, there is no such base model; INVALID_REQUEST, another parameter is given.
        """
        check_parameters(request.query_params, "model")
        limiter = self._gateway.limiter
        trouble = await self._redis_trouble.get()
        warning = trouble or await limiter.warning()
        found = readiness(self._gateway.models, limiter, request.query_params.get("model", ""))
        state = {
            "status": found.status,
            "reason": "; ".join(filter(None, (found.reason, warning and f"Redis: {warning}"))) or None,
            "engine": found.engines,
            "models": {name: trouble or None for name, trouble in found.troubles.items()},
            "redis": not trouble,
            "limiter": limiter.mode,
            "limiter_modes": sorted(limiter.modes),
        }
        return json_response(state, 200 if found.serves else 503)

    async def version(self, request: Request) -> Response:
        return json_response({"version": version("loralane")})

    async def openapi(self, request: Request) -> Response:
        self._openapi = self._openapi or await asyncio.to_thread(_document, self._surface)
        return Response(self._openapi, media_type="application/json")

    async def _generation(self, request: Request, parse: Parser[GenerationCall]) -> GenerationResponse:
        call, whole = await self._begun(request, parse)
        return GenerationResponse(whole, call, self._ping_seconds)

    async def _begun(self, request: Request, parse: Parser[Call]) -> tuple[Call, WholeResponse]:
        """Authenticate the caller, read the body and parse it. Return the parsed call, and the ASGI response that runs
        its generation."""
        with self._arriving(request) as arrival:
            call, whole = await self._understood(request, arrival, self._at_once(parse))
        return call, whole

    async def _understood(
        self, request: Request, arrival: ArrivingRequest, understood: Understanding[Call]
    ) -> tuple[Call, WholeResponse]:
        """Authenticate the caller, read the body, wait until the gateway lets the tenant begin another request (a few
        per iteration of the event loop), and parse the body with `understood`. Return the parsed call, and the ASGI
        response that runs its generation."""
        arrived = time.monotonic()
        principal = arrival.identify(self._authenticate(request))
        if has_long_body(request):  # which is not worth reading if the tenant has no slot for its request
            name = principal.tenant.name
            asked = ReserveRequest(request_id(request), name, principal.limits_key, tokens=0, adapter=EACH)
            await self._gateway.limiter.check_requests(asked)
        body = await read_body(request, self._max_body_bytes)
        await self._gateway.turns.take(principal.tenant.name)
        call = await understood(principal.tenant, body, request_id(request), arrival.ingress)
        hold_of(request).free()  # from here on, the limits of running requests apply
        limited = with_time_limits(call.request, request.scope, time.monotonic() - arrived)
        return call, WholeResponse(self._gateway, principal, call, limited, hold_of(request))

    def _at_once(self, parse: Parser[Call]) -> Understanding[Call]:
        """Return `parse`, bound to this gateway, as an asynchronous parser that runs it in a thread for a long body."""

        async def understood(tenant: Tenant, body: bytes, request_id: str, ingress: Ingress) -> Call:
            bound = partial(parse, self._gateway, tenant, body, request_id, ingress)
            return await self._gateway.parsing.run(tenant.name, len(body), bound)

        return understood

    def _model(self, card: ModelCard) -> Json:
        """Return a model's entry in OpenAI's model list, with the format of the base model's weights, the sampling
        parameters of requests that set none, and what renders chats."""
        info = card.model.engine.info
        return {
            "id": card.name,
            "object": "model",
            "created": card.created,
            "owned_by": "loralane",
            "root": card.root,
            "parent": card.parent,
            "max_model_len": info.max_model_len,
            "weights": info.weights,
            "default_sampling_params": card.model.intake.sampling_defaults,
            "chat_template": template_name(card.adapter) if card.adapter else BASE,
        }

    def _tenant(self, request: Request) -> Principal:
        return self._authenticate(request).as_tenant()

    def _authenticate(self, request: Request) -> Principal:
        principal = self._keys.authenticate(api_key(request))
        hold_of(request).identify(principal.tenant)
        return principal

    def _arriving(self, request: Request) -> AbstractContextManager[ArrivingRequest]:
        trace = trace_context_from(header(request.scope, b"traceparent"))
        session = session_from(header(request.scope, b"x-session-id"))
        return self._gateway.arriving(request_id(request), Ingress(request.scope["path"], trace, session))
