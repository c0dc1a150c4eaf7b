"""Makes routes from the rows of the API and their handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from gateway.api_schema.operation import Operation

Handler = Callable[[Request], Awaitable[Any]]
"""Answers a request of anyone or of a tenant with an ASGI response."""


def routes_of(handlers: Mapping[Operation[Any], Handler]) -> list[Route]:
    """Return a route for each operation, in the order of the mapping."""
    return [Route(each.path, handler, methods=[each.method]) for each, handler in handlers.items()]
