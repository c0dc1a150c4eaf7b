"""Makes the routes of administrators from the rows of the API and the functions that answer them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.administration.trail import AdminCall, AdminTrail
from gateway.api_schema.adapters import ADAPTERS
from gateway.api_schema.operation import Operation
from gateway.core.errors import ApiError
from gateway.core.tenants import Authenticator, Principal
from gateway.http.body import read_body
from gateway.http.caller import authenticate, request_id
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
    trail: AdminTrail
    max_body_bytes: int
    forget: Callable[[], None]
    """Called after each change, so that the next overview shows it."""

    def route(self, operation: Operation, answering: Answering) -> Route:
        """Return the route of an operation.

        Callers who are no administrators of its role get an ApiError before their body is read. Others get one for a
        query parameter, or a field of a change without a body, that the operation does not have: each of them is likely
        to be a misspelling, without which more would be changed than was meant. Responses are never cached.
        """

        async def answer(request: Request) -> Response:
            caller = authenticate(self.keys, request).as_admin(operation.role)
            try:
                check_parameters(request.query_params, *operation.query)
                body = await self._body(operation, request)
                call = _call(operation, request, caller, body)
                found = await self.trail.run(call, partial(answering, request, *body), _made_id)
            except ApiError as error:
                if request.scope["path"].startswith(ADAPTERS):
                    error.param = NATIVE_FIELDS.get(error.param, error.param)
                raise
            if operation.is_change:
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
        if operation.is_change:
            parse(await read_body(request, self.max_body_bytes) or b"{}", NoBody)
        return ()


def _call(operation: Operation, request: Request, caller: Principal, body: tuple[Any, ...]) -> AdminCall:
    """Return what a request asks for. Names of the path stand before those of the query and the body."""
    assert caller.administrator is not None, "the caller is an administrator"
    fields = msgspec.structs.asdict(body[0]) if body else {}
    given = {**request.query_params, **fields, **request.path_params}
    names = {name: value for name, value in given.items() if isinstance(value, str)}
    address = request.client.host if request.client else ""
    return AdminCall(caller.administrator, operation, names, "http", address, request_id(request))


def _made_id(answer: Struct | Response) -> str:
    return getattr(answer, "id", "")
