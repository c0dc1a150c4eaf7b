"""The settings of the HTTP server, uvicorn, whose connections `GuardedProtocol` guards."""

from __future__ import annotations

from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from gateway.http.drain_turns import DrainTurns
from gateway.http.guard import GuardedProtocol
from gateway.requests.wire_room import WireRoom

KEEP_ALIVE_SECONDS = 75.0
"""Seconds that a connection may be idle, by default. This is longer than the time for which clients and proxies keep a
connection (httpx, and so OpenAI's client, 5 s; nginx and AWS's load balancers 60 s), because a request that is sent on
a connection that is just being closed fails."""


def guarded_config(
    app: ASGIApp,
    protocol: type[GuardedProtocol] = GuardedProtocol,
    *,
    room: WireRoom | None = None,
    keep_alive_s: float = KEEP_ALIVE_SECONDS,
    **options: Any,
) -> uvicorn.Config:
    """Return the uvicorn configuration that serves an application with `protocol`, whose connections are closed after
    `keep_alive_s` idle seconds. `room` bounds what strangers hold; None means one of its own. `options` are further
    arguments of `uvicorn.Config`. WebSockets and uvicorn's logs are off, and proxy headers are ignored, because the
    caller's identity follows from its key alone."""
    fixed: dict[str, Any] = {"ws": "none", "proxy_headers": False, "log_config": None, "access_log": False}
    http: Any = partial(protocol, room=room or WireRoom(), drains=DrainTurns())
    return uvicorn.Config(app, http=http, timeout_keep_alive=keep_alive_s, **fixed, **options)  # type: ignore[arg-type]
