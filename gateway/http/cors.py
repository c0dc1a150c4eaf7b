"""CORS: lets pages of other origins read the API's responses. It never applies to administration."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.part import is_admin_path
from gateway.core.safe_url import ANY, origin_pattern
from gateway.http.openapi.document import HEADERS

METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS")
EXPOSED = (*HEADERS, "content-disposition", "request-id")
"""Response headers that a page of another origin may read, besides those that browsers always expose."""
PREFLIGHT_SECONDS = 600


class Cors:
    """ASGI middleware that answers preflight requests before authentication, and adds CORS headers to all other
    responses to requests with an Origin, also to errors and streams. Requests to administration's paths pass unchanged.

    Pages send their key in a header. Credentials that a browser adds by itself, such as cookies, are never allowed.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        """Wrap an application. `origins` are the allowed origins, at least one, which `ANY` makes every origin; they
        must have been checked by `gateway.core.safe_url.check_origins`."""
        self._app = app
        self._shared = CORSMiddleware(
            app,
            allow_origins=(ANY,) if ANY in origins else (),
            allow_origin_regex=None if ANY in origins else origin_pattern(origins),
            allow_methods=METHODS,
            allow_headers=(ANY,),  # echoes the preflight's list, because clients add headers over time (x-stainless-*)
            expose_headers=EXPOSED,
            max_age=PREFLIGHT_SECONDS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        excluded = scope["type"] != "http" or is_admin_path(scope["path"])
        await (self._app if excluded else self._shared)(scope, receive, send)
