"""The HTTP API for stored responses, following OpenAI's, below /v1/responses."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.errors import ApiError, invalid_request
from gateway.http.caller import hold_of, tenant_of
from gateway.http.edge import AsgiEndpoint
from gateway.http.lists import MAX_NUMBER, check_parameters, newest_first, parse_number
from gateway.http.settings import PortSettings
from gateway.http.stream import DisconnectWatch, SseStream, json_response
from gateway.openai.render import list_page
from gateway.protocols.generation import RESPONSES
from gateway.responses.events import EventFeed
from gateway.responses.service import DEFAULT_PAGE, MAX_PAGE
from gateway.services import Services

RESPONSE = RESPONSES + "/{response_id}"
CANCEL = RESPONSE + "/cancel"
INPUT_ITEMS = RESPONSE + "/input_items"


class FeedResponse(Struct, frozen=True):
    """An ASGI response that sends the events of a background response until the response ends or the client
    disconnects. A disconnect does not end the background response. Errors before the first byte are raised; a later one
    becomes the last event."""

    feed: EventFeed
    ping_seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = SseStream(send)
        async with DisconnectWatch(receive), aclosing(self.feed.pages()) as pages:
            events.add(await anext(pages))
            await events.open({})
            async with events.pings(self.ping_seconds, self.feed.ping):
                try:
                    await events.flush()
                    async for page in pages:
                        events.add(page)
                        await events.flush()
                except ApiError as error:
                    events.add(self.feed.failure(error))
            await events.close()


class StoredResponsesApi:
    """Handlers for stored responses. Only tenants can call them, each for its own responses."""

    def __init__(self, services: Services, settings: PortSettings) -> None:
        self._gateway = services.gateway
        self._responses = services.responses
        self._accounts = services.accounts
        self._ping_seconds = settings.ping_seconds

    def routes(self) -> list[Route]:
        return [
            Route(RESPONSE, AsgiEndpoint(self.show), methods=["GET"]),
            Route(RESPONSE, self.delete, methods=["DELETE"]),
            Route(CANCEL, self.cancel, methods=["POST"]),
            Route(INPUT_ITEMS, self.input_items, methods=["GET"]),
        ]

    async def show(self, request: Request) -> ASGIApp:
        """Answer with a response object or, with `stream`, with the events of a background response."""
        tenant, given = self._tenant(request), request.query_params
        check_parameters(given, "include", "include[]", "include_obfuscation", "starting_after", "stream")
        stream, after = given.get("stream", "false"), given.get("starting_after")
        if stream not in ("true", "false"):
            raise invalid_request("stream must be true or false", "stream")
        if stream == "true":
            number = -1 if after is None else parse_number(after, "starting_after", 0, MAX_NUMBER)
            feed = self._responses.events(self._gateway, tenant, _id(request), number)
            return FeedResponse(feed, self._ping_seconds)
        if after is not None:
            raise invalid_request("starting_after needs stream=true", "starting_after")
        async with self._reading(request):
            return json_response(await self._responses.get(tenant, _id(request)))

    async def delete(self, request: Request) -> Response:
        return json_response(await self._responses.delete(self._tenant(request), _id(request)))

    async def cancel(self, request: Request) -> Response:
        return json_response(await self._responses.cancel(self._tenant(request), _id(request)))

    async def input_items(self, request: Request) -> Response:
        tenant, given = self._tenant(request), request.query_params
        check_parameters(given, "after", "include", "include[]", "limit", "order")
        limit, order = (
            parse_number(given.get("limit", str(DEFAULT_PAGE)), "limit", 1, MAX_PAGE),
            given.get("order", "desc"),
        )
        options: dict[str, Any] = {"after": given.get("after"), "limit": limit, "newest_first": newest_first(order)}
        async with self._reading(request):
            page = await self._responses.input_items(tenant, _id(request), **options)
        return json_response(list_page(page.data, page.has_more))

    def _reading(self, request: Request) -> AbstractAsyncContextManager[None]:
        """Return a context manager in which a stored response, of up to megabytes, is read: one of each tenant at a
        time, and none while the tenant leaves too many answers unread (RATE_LIMIT_EXCEEDED)."""
        return self._gateway.encoding.take(hold_of(request))

    def _tenant(self, request: Request) -> str:
        return tenant_of(self._accounts, request).tenant.name


def _id(request: Request) -> str:
    return str(request.path_params["response_id"])
