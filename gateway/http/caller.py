"""What a request says of itself and of its caller: its id, its headers, its key and the bytes that it holds."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Scope

from gateway.core.tenants import Authenticator, Principal
from gateway.requests.wire_room import WireHold

HEAD_BYTES = "head_bytes"
"""Name in a request's state under which the server leaves the size of its headers in bytes."""
HOLD = "hold"
"""Name in a request's state under which its `WireHold` is."""


def header(scope: Scope, name: bytes) -> str:
    """Return the value of the first request header with a name, given in lower case; empty if there is none."""
    for known, value in scope["headers"]:
        if known == name:
            return str(value, "latin-1")
    return ""


def request_id(request: Request) -> str:
    return str(request.scope["state"]["request_id"])


def api_key(request: Request) -> str | None:
    """Return the API key in the header `Authorization: Bearer KEY` or, if there is none or it is empty, in `x-api-key`,
    where Anthropic's clients send it. None means that there is neither."""
    scheme, _, token = header(request.scope, b"authorization").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return bearer or header(request.scope, b"x-api-key").strip() or None


def origin(scope: Scope) -> tuple[str, str]:
    """Return the address of a connection's peer, empty if there is none, and all of its X-Forwarded-For."""
    peer = scope.get("client") or ("",)
    forwarded = [str(value, "latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"]
    return peer[0] or "", ",".join(forwarded)


def authenticate(keys: Authenticator, request: Request) -> Principal:
    """Return the caller of a request, to whose tenant the bytes that the request holds are counted from now on. Raises
    ApiError: INVALID_API_KEY, KEY_EXPIRED, ADDRESS_NOT_ALLOWED."""
    principal = keys.authenticate(api_key(request))
    if principal.networks:
        keys.check_address(principal, *origin(request.scope))
    hold_of(request).identify(principal.tenant)
    return principal


def tenant_of(keys: Authenticator, request: Request) -> Principal:
    """Return the caller of a request that is for tenants. Raises ApiError: FORBIDDEN, the caller is an administrator;
    and what `authenticate` raises."""
    return authenticate(keys, request).as_tenant()


def hold_of(request: Request) -> WireHold:
    """Return what counts the bytes that a request holds. They are freed when the request ends, at the latest."""
    hold: WireHold = request.scope["state"][HOLD]
    return hold
