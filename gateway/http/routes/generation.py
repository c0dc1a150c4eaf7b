"""The endpoints that run a generation: one way from the route to `Gateway.generate` and back for every protocol."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.limits import EACH
from gateway.core.tenants import Principal
from gateway.core.trace_context import Ingress, session_from, trace_context_from
from gateway.http.body import has_long_body, read_body
from gateway.http.caller import authenticate, header, hold_of, request_id
from gateway.http.routes.responses import FeedResponse
from gateway.http.settings import PortSettings
from gateway.http.stream import DisconnectWatch, json_response, send_stream, send_whole
from gateway.http.time_limits import with_time_limits
from gateway.limiter.base import ReserveRequest
from gateway.openai.render import Json
from gateway.protocols.generation import Call, PooledCall, Protocols
from gateway.requests.types import GenerateRequest
from gateway.responses.events import EventFeed
from gateway.services import Services


def generation_routes(services: Services, settings: PortSettings) -> list[Route]:
    """Return the routes of all endpoints that run a generation."""
    protocols = Protocols(services.gateway, services.responses)
    return [
        Route(path, GenerationEndpoint(services, settings, protocols, path), methods=["POST"])
        for path in protocols.by_path
    ]


class GenerationEndpoint:
    """ASGI endpoint of a route whose requests run a generation."""

    def __init__(self, services: Services, settings: PortSettings, protocols: Protocols, path: str) -> None:
        self._gateway = services.gateway
        self._accounts = services.accounts
        self._settings = settings
        self._protocols = protocols
        self._path = path
        self._field_names = protocols.by_path[path].field_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate the caller, read the body, wait until the gateway lets the tenant begin another request (a few
        per iteration of the event loop), parse the body, run the generation, and send the answer, whole or as a stream.

        Errors before the first byte are raised; later ones become the last events of the stream. The generation is
        aborted when the client disconnects.
        """
        request, arrived = Request(scope, receive), time.monotonic()
        gateway, hold, name = self._gateway, hold_of(request), request_id(request)

        def limited(call: Call) -> GenerateRequest:
            hold.free()  # from here on, the limits of running requests apply
            return with_time_limits(call.request, scope, time.monotonic() - arrived)

        with gateway.arriving(name, _ingress(scope)) as arrival:
            principal = arrival.identify(authenticate(self._accounts, request))
            if has_long_body(request):
                await self._check_slot(principal, name)
            body = await read_body(request, self._settings.max_body_bytes)
            await gateway.turns.take(principal.tenant.name)
            beginning = self._protocols.begin(self._path, principal, body, (name, arrival.ingress), limited)
            del body  # the answer may take minutes
            begun = await beginning
        if begun.queued is not None:
            await self._queued(begun.call, *begun.queued)(scope, receive, send)
            return
        with self._field_names():
            async with DisconnectWatch(receive) as client:
                running = gateway.generate(principal, begun.wanted)
                if isinstance(begun.call, PooledCall) or not begun.call.stream:
                    await send_whole(running, begun.call, send, client, hold)
                else:
                    await send_stream(running, begun.call, send, self._settings.ping_seconds)

    async def _check_slot(self, principal: Principal, request_id: str) -> None:
        """Raise ApiError if the tenant has no slot for another request, so that its long body is not worth reading."""
        tenant, key = principal.tenant.name, principal.limits_key
        await self._gateway.limiter.check_requests(ReserveRequest(request_id, tenant, key, tokens=0, adapter=EACH))

    def _queued(self, call: Call, queued: Json, feed: EventFeed) -> ASGIApp:
        """Return the answer to a request in the background: the queued response object or the stream of its events."""
        streams = not isinstance(call, PooledCall) and call.stream
        return FeedResponse(feed, self._settings.ping_seconds) if streams else json_response(queued)


def _ingress(scope: Scope) -> Ingress:
    trace = trace_context_from(header(scope, b"traceparent"))
    return Ingress(scope["path"], trace, session_from(header(scope, b"x-session-id")))
