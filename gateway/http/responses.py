"""HTTP side of /v1/responses."""

from __future__ import annotations

from msgspec import Struct
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.responses.parse import own_names


class OwnNames(Struct, frozen=True):
    """An ASGI application that runs another one, and calls fields in its errors by their names in /v1/responses."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with own_names():
            await self.app(scope, receive, send)
