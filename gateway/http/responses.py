"""The HTTP API for stored responses, following OpenAI's, below /v1/responses, and the names of fields there."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.errors import unsupported_parameter
from gateway.core.tenants import Principal
from gateway.http.lists import check_parameters, list_page, newest_first, parse_number
from gateway.http.stream import json_response
from gateway.responses.parse import own_names
from gateway.responses.service import DEFAULT_PAGE, MAX_PAGE, Responses

RESPONSES = "/v1/responses"
RESPONSE = RESPONSES + "/{response_id}"
CANCEL = RESPONSE + "/cancel"
INPUT_ITEMS = RESPONSE + "/input_items"


class OwnNames(Struct, frozen=True):
    """An ASGI application that runs another one, and calls fields in its errors by their names in /v1/responses."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with own_names():
            await self.app(scope, receive, send)


class StoredResponsesApi:
    """Handlers for stored responses. Only tenants can call them, each for its own responses."""

    def __init__(self, responses: Responses, authenticate: Callable[[Request], Principal]) -> None:
        self._responses = responses
        self._authenticate = authenticate

    def routes(self) -> list[Route]:
        return [
            Route(RESPONSE, self.show, methods=["GET"]),
            Route(RESPONSE, self.delete, methods=["DELETE"]),
            Route(CANCEL, self.cancel, methods=["POST"]),
            Route(INPUT_ITEMS, self.input_items, methods=["GET"]),
        ]

    async def show(self, request: Request) -> Response:
        tenant, given = self._tenant(request), request.query_params
        check_parameters(given, "include", "include[]", "include_obfuscation", "starting_after", "stream")
        if given.get("stream", "false") != "false" or "starting_after" in given:
            name = "starting_after" if "starting_after" in given else "stream"
            raise unsupported_parameter(name, "is not supported for stored responses; poll without it")
        return json_response(await self._responses.get(tenant, _id(request)))

    async def delete(self, request: Request) -> Response:
        await self._responses.delete(self._tenant(request), _id(request))
        return json_response({"id": _id(request), "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        return json_response(await self._responses.cancel(self._tenant(request), _id(request)))

    async def input_items(self, request: Request) -> Response:
        tenant, given = self._tenant(request), request.query_params
        check_parameters(given, "after", "include", "include[]", "limit", "order")
        page = await self._responses.input_items(
            tenant,
            _id(request),
            after=given.get("after"),
            limit=parse_number(given.get("limit", str(DEFAULT_PAGE)), "limit", 1, MAX_PAGE),
            newest_first=newest_first(given.get("order", "desc")),
        )
        return json_response(list_page(page.data, page.has_more))

    def _tenant(self, request: Request) -> str:
        return self._authenticate(request).as_tenant().tenant.name


def _id(request: Request) -> str:
    return str(request.path_params["response_id"])
