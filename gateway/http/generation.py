"""The endpoints that run a generation: one way from the route to `Gateway.generate` and back for every protocol."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from msgspec import Struct
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.anthropic.calls import MessageCall, message_call
from gateway.core.limits import EACH
from gateway.core.tenants import Principal, Tenant
from gateway.core.trace_context import Ingress, session_from, trace_context_from
from gateway.embeddings.calls import PooledCall, embeddings_call, rerank_call, score_call
from gateway.http.edge import authenticate, has_long_body, header, hold_of, read_body, request_id
from gateway.http.invocations import invocation_call
from gateway.http.responses import RESPONSES, FeedResponse
from gateway.http.settings import PortSettings
from gateway.http.stream import DisconnectWatch, json_response, send_stream, send_whole
from gateway.http.time_limits import with_time_limits
from gateway.limiter.base import ReserveRequest
from gateway.openai.calls import ApiCall, chat_call, completion_call
from gateway.requests.service import Gateway
from gateway.requests.types import GenerateRequest
from gateway.responses.calls import ResponseCall
from gateway.responses.parse import own_names
from gateway.services import Services

RERANK = ("/v1/rerank", "/rerank", "/v2/rerank")
"""Paths of one endpoint: Jina's and the two that vLLM and Cohere's clients use besides."""
SCORE = ("/v1/score", "/score")

Call = ApiCall | MessageCall | ResponseCall | PooledCall
"""A parsed request: what is generated, and how the answer is rendered."""
Parser = Callable[[Gateway, Tenant, bytes, str, Ingress], Awaitable[Call]]
"""Function that parses the body of a tenant's request, given the request id and the ingress, too."""


class ApiProtocol(Struct, frozen=True):
    """What the requests to one endpoint differ in from others. Their calls render the answers; the edge chooses the
    shape of errors by the path."""

    parse: Parser
    field_names: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context manager in which errors call fields by the protocol's names for them."""


def generation_routes(services: Services, settings: PortSettings) -> list[Route]:
    """Return the routes of all endpoints that run a generation."""
    protocols: Mapping[str, ApiProtocol] = {
        "/v1/chat/completions": ApiProtocol(_off_the_loop(chat_call)),
        "/v1/completions": ApiProtocol(_off_the_loop(completion_call)),
        RESPONSES: ApiProtocol(services.responses.call, own_names),
        "/v1/messages": ApiProtocol(_off_the_loop(message_call)),
        "/v1/embeddings": ApiProtocol(_off_the_loop(embeddings_call)),
        **dict.fromkeys(RERANK, ApiProtocol(_off_the_loop(rerank_call))),
        **dict.fromkeys(SCORE, ApiProtocol(_off_the_loop(score_call))),
        "/invocations": ApiProtocol(_off_the_loop(invocation_call)),
    }
    return [
        Route(path, GenerationEndpoint(services, settings, protocol), methods=["POST"])
        for path, protocol in protocols.items()
    ]


def _off_the_loop(parse: Callable[[Gateway, Tenant, bytes, str, Ingress], Call]) -> Parser:
    """Return `parse` as an asynchronous parser, which parses a long body in a thread."""

    async def parsed(gateway: Gateway, tenant: Tenant, body: bytes, request_id: str, ingress: Ingress) -> Call:
        bound = partial(parse, gateway, tenant, body, request_id, ingress)
        return await gateway.parsing.run(tenant.name, len(body), bound)

    return parsed


class GenerationEndpoint:
    """ASGI endpoint of a route whose requests run a generation."""

    def __init__(self, services: Services, settings: PortSettings, protocol: ApiProtocol) -> None:
        self._gateway = services.gateway
        self._accounts = services.accounts
        self._responses = services.responses
        self._settings = settings
        self._protocol = protocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate the caller, read the body, wait until the gateway lets the tenant begin another request (a few
        per iteration of the event loop), parse the body, run the generation, and send the answer, whole or as a stream.

        Errors before the first byte are raised; later ones become the last events of the stream. The generation is
        aborted when the client disconnects.
        """
        request, arrived = Request(scope, receive), time.monotonic()
        gateway, hold, name = self._gateway, hold_of(request), request_id(request)
        with gateway.arriving(name, _ingress(scope)) as arrival:
            principal = arrival.identify(authenticate(self._accounts, request))
            if has_long_body(request):
                await self._check_slot(principal, name)
            body = await read_body(request, self._settings.max_body_bytes)
            await gateway.turns.take(principal.tenant.name)
            call = await self._protocol.parse(gateway, principal.tenant, body, name, arrival.ingress)
            del body  # the answer may take minutes
            hold.free()  # from here on, the limits of running requests apply
            wanted = with_time_limits(call.request, scope, time.monotonic() - arrived)
            apart = await self._begun_apart(principal, call, wanted)
        if apart is not None:
            await apart(scope, receive, send)
            return
        with self._protocol.field_names():
            async with DisconnectWatch(receive) as client:
                running = gateway.generate(principal, wanted)
                if isinstance(call, PooledCall) or not call.stream:
                    await send_whole(running, call, send, client, hold)
                else:
                    await send_stream(running, call, send, self._settings.ping_seconds)

    async def _check_slot(self, principal: Principal, request_id: str) -> None:
        """Raise ApiError if the tenant has no slot for another request, so that its long body is not worth reading."""
        tenant, key = principal.tenant.name, principal.limits_key
        await self._gateway.limiter.check_requests(ReserveRequest(request_id, tenant, key, tokens=0, adapter=EACH))

    async def _begun_apart(self, principal: Principal, call: Call, wanted: GenerateRequest) -> ASGIApp | None:
        """Begin a background response, and return its answer: the queued response object or the stream of its events.
        None means that the call asks for none."""
        if not isinstance(call, ResponseCall) or not call.in_background:
            return None
        queued, feed = await self._responses.begin(self._gateway, principal, call, wanted)
        return FeedResponse(feed, self._settings.ping_seconds) if call.stream else json_response(queued)


def _ingress(scope: Scope) -> Ingress:
    trace = trace_context_from(header(scope, b"traceparent"))
    return Ingress(scope["path"], trace, session_from(header(scope, b"x-session-id")))
