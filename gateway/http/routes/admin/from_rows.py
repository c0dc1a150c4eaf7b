"""Makes the routes of administrators from the rows of the API and the functions that answer them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.api_schema.adapters import ADAPTERS
from gateway.api_schema.operation import Operation
from gateway.core.errors import ApiError
from gateway.core.tenants import Authenticator
from gateway.http.body import read_body
from gateway.http.caller import authenticate
from gateway.http.lists import check_parameters
from gateway.http.stream import json_response
from gateway.openai.parse import parse

Answering = Callable[..., Awaitable[Struct | Response]]
"""Answers an operation: takes the request and, if the operation has a body, that body as its struct. Returns the struct
that the operation's row names, or a response where that is not JSON."""
Answers = Mapping[Operation, Answering]

NATIVE_FIELDS: dict[str | None, str] = {"lora_name": "name", "lora_path": "source"}
"""Field of vLLM's adapter routes -> the same field below /admin/v1/adapters. Errors are raised with vLLM's names and
renamed by this mapping in responses below /admin/v1/adapters."""


class NoBody(Struct, forbid_unknown_fields=True):
    """Body of a change that takes no fields. A caller may leave it out, or send an empty object."""


@dataclass(frozen=True, slots=True)
class Administration:
    """What all operations of administrators have in common."""

    keys: Authenticator
    max_body_bytes: int
    forget: Callable[[], None]
    """Called after each change, so that the next overview shows it."""

    def route(self, operation: Operation, answering: Answering) -> Route:
        """Return the route of an operation.

        Other callers than administrators get an ApiError before their body is read, and administrators one for a query
        parameter, or a field of a change without a body, that the operation does not have: each of them is likely to be
        a misspelling, without which more would be changed than was meant. Responses are never cached.
        """

        async def answer(request: Request) -> Response:
            authenticate(self.keys, request).as_admin()
            try:
                check_parameters(request.query_params, *operation.query)
                found = await answering(request, *await self._body(operation, request))
            except ApiError as error:
                if request.scope["path"].startswith(ADAPTERS):
                    error.param = NATIVE_FIELDS.get(error.param, error.param)
                raise
            if operation.method != "GET":
                self.forget()
            response = found if isinstance(found, Response) else json_response(found, operation.status)
            response.headers["cache-control"] = "no-store"
            return response

        return Route(operation.path, answer, methods=[operation.method])

    async def _body(self, operation: Operation, request: Request) -> tuple[Any, ...]:
        """Return a request's body, if the operation takes one. Raises ApiError, also for fields in the body of a change
        that takes none."""
        if operation.body is not None:
            empty = b"{}" if operation.body_is_optional else b""
            return (parse(await read_body(request, self.max_body_bytes) or empty, operation.body),)
        if operation.method != "GET":
            parse(await read_body(request, self.max_body_bytes) or b"{}", NoBody)
        return ()
