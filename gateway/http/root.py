"""`GET /`: what a person who opens the gateway's address in a browser meets, and how clients learn what answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gateway.core.part import Part, offers_path
from gateway.http.console import CONSOLE
from gateway.http.stream import json_response

ROOT = "/"


@dataclass(frozen=True, slots=True)
class GrpcAddress:
    """The gRPC port that belongs to a port of HTTP."""

    port: int
    tls: bool


GrpcAddressOf = Callable[[], GrpcAddress | None]
"""Returns None where gRPC is not served, or not yet."""


class RootApi:
    """Sends browsers to the console, where this port has it, and tells other clients where gRPC is."""

    def __init__(self, part: Part, grpc: GrpcAddressOf) -> None:
        self._has_console = offers_path(part, CONSOLE)
        self._grpc = grpc

    def routes(self) -> list[Route]:
        return [Route(ROOT, self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        if self._has_console and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(CONSOLE.removeprefix("/"))  # relative: a proxy may have put a path before ours
        grpc = self._grpc()
        address = None if grpc is None else {"port": grpc.port, "tls": grpc.tls}
        return json_response({"name": "loralane", "version": version("loralane"), "grpc": address})
