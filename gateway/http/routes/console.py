"""Serves the console: static files without any data. The page gets its data from the admin API, with a key that the
operator types in."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.api_schema import console as api
from gateway.core.errors import route_not_found
from gateway.http.routes.from_rows import routes_of

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
    }
)


class ConsoleFiles:
    """Routes and handlers that serve the console's files. The constructor reads the files into memory, so that no name
    from a caller is ever looked up on disk; a name that is not among them gets ApiError: ROUTE_NOT_FOUND."""

    def __init__(self) -> None:
        folder = resources.files("gateway.console")
        self._files = {entry.name: entry.read_bytes() for entry in folder.iterdir() if _suffix(entry.name) in TYPES}

    def routes(self) -> list[Route]:
        return routes_of({api.PAGE: self.page, api.FILE: self.file})

    async def page(self, request: Request) -> Response:
        return self._response("index.html")

    async def file(self, request: Request) -> Response:
        name = request.path_params["file"]
        if name not in self._files:
            raise route_not_found(request.method, request.url.path)
        return self._response(name)

    def _response(self, name: str) -> Response:
        return Response(self._files[name], headers={**HEADERS, "content-type": TYPES[_suffix(name)]})


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
