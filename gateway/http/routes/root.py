"""`GET /`: leads a person who opens the gateway's address in a browser to the console, and tells other clients what
serves this address."""

from __future__ import annotations

from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gateway.api_schema import status as api
from gateway.api_schema.console import CONSOLE
from gateway.core.part import serves_path
from gateway.http.routes.from_rows import routes_of
from gateway.http.settings import PortSettings
from gateway.http.stream import json_response


class RootApi:
    """Handler of `GET /`: redirects browsers, which accept text/html, to the console if this port serves it, and sends
    other clients the name, the version, and the port and TLS use of gRPC."""

    def __init__(self, settings: PortSettings) -> None:
        self._has_console = serves_path(settings.surface, CONSOLE)
        self._grpc = settings.grpc

    def routes(self) -> list[Route]:
        return routes_of({api.ROOT: self.show})

    async def show(self, request: Request) -> Response:
        if self._has_console and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(CONSOLE.removeprefix("/"))  # relative, because a proxy may add a path prefix
        grpc = self._grpc()
        address = None if grpc is None else api.GrpcPort(grpc.port, grpc.tls)
        return json_response(api.Root("loralane", version("loralane"), address))
