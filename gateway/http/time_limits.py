"""Time limits that a caller sets in request headers, in place of or besides those in the body.

HTTP has no standard headers for time limits. The values are seconds, like the timeouts of OpenAI's SDK. The SDK sends
its own timeout in `x-stainless-read-timeout`; this header has no effect here, because no caller asked for it.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace
from starlette.types import Scope

from gateway.api_schema.chats import Seconds
from gateway.core.errors import MAX_QUOTED, invalid_request
from gateway.http.caller import header
from gateway.requests.deadlines import earliest
from gateway.requests.types import GenerateRequest

REQUEST_TIMEOUT, STALL_TIMEOUT = "x-request-timeout", "x-stall-timeout"
TIME_LIMIT_HEADERS = {
    REQUEST_TIMEOUT: "Seconds for the whole answer, from when the request arrived.",
    STALL_TIMEOUT: "Seconds for each token after the first.",
}


def with_time_limits(request: GenerateRequest, scope: Scope, waited: float) -> GenerateRequest:
    """Return a request whose time limits are the shorter ones of its body and its headers. `waited` is how many seconds
    ago the request arrived; they count towards its deadline. Raises ApiError: INVALID_REQUEST, a header is not a number
    of seconds that the body would accept."""
    deadline = earliest(request.deadline, _seconds(scope, REQUEST_TIMEOUT))
    stall = earliest(request.stall, _seconds(scope, STALL_TIMEOUT))
    return replace(request, deadline=None if deadline is None else deadline - waited, stall=stall)


def _seconds(scope: Scope, name: str) -> float | None:
    """Return the number of seconds in a header. None means that the header is missing or empty."""
    text = header(scope, name.encode())
    try:
        return msgspec.convert(text, Seconds, strict=False) if text else None
    except msgspec.ValidationError as error:
        quoted = text[:MAX_QUOTED]
        raise invalid_request(f"{name} must be seconds, above 0 and at most 86400, not {quoted!r}", name) from error
