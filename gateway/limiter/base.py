"""Rate limits as the rest of the gateway sees them: reserve before the work, settle after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.core.budget import Allowance, Bucket, explain, tightest
from gateway.core.errors import ApiError, Fault
from gateway.core.tenants import Limits, Tenant

Policy = Literal["degraded", "closed", "open"]
"""What is done while Redis is away: limit locally, refuse, or admit."""

Mode = Literal["redis", "degraded", "closed", "open"]
"""redis: shared and exact; the others: the policy, at work."""


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """One request wants in, and may use up to `tokens` tokens (prompt and all outputs)."""

    request_id: str
    tenant: str
    key_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to run, and the receipt that settles it."""

    lease: str
    """Unique to this reservation, even where request ids repeat."""
    request: ReserveRequest
    source: Literal["redis", "local", "none"]
    """Whose books it stands in."""
    buckets: tuple[Bucket, ...] = ()
    """Tenant's and key's, as this reservation left them; empty: not limited."""

    @property
    def requests(self) -> Allowance | None:
        """Of the scope with fewest requests left; None: not limited."""
        return tightest([bucket.requests.allowance for bucket in self.buckets])

    @property
    def tokens(self) -> Allowance | None:
        """Of the scope with fewest tokens left; None: not limited."""
        return tightest([bucket.tokens.allowance for bucket in self.buckets])

    def headers(self) -> dict[str, str]:
        """x-ratelimit-{limit,remaining,reset}-{requests,tokens}, for responses of any status."""
        return rate_headers(self.buckets)


class Limiter(Protocol):
    """All calls may run concurrently. Settling is exact and idempotent: the first of settle and refund counts."""

    @property
    def mode(self) -> Mode: ...

    async def reserve(self, request: ReserveRequest) -> Grant:
        """Charges one request and `tokens` tokens to every scope, or charges nothing.

        Raises:
            ApiError: RATE_LIMIT_EXCEEDED with the true wait, INSUFFICIENT_QUOTA when no wait can help,
                LIMITER_UNAVAILABLE.
        """

    async def settle(self, grant: Grant, actual_tokens: int) -> None:
        """Corrects the reservation to what was used: the rest is given back, an excess becomes debt."""

    async def refund(self, grant: Grant) -> None:
        """Gives back everything, the request included: for failures of ours."""

    async def configure(self, tenants: Iterable[Tenant]) -> None:
        """Publishes configured limits, leaving those changed live as they are. Unknown tenants have none."""

    async def limits(self, tenant: str, key_id: str | None = None) -> Limits:
        """What is in force for a tenant, or for one key of it."""

    async def set_limits(self, tenant: str, limits: Limits | None, key_id: str | None = None) -> None:
        """Changes limits live, from the next request on, outlasting restarts; None returns to the configured ones."""

    async def outstanding(self) -> int:
        """Reservations not settled yet: 0 when nothing runs."""

    async def ping(self) -> bool:
        """Whether the shared books can be reached."""

    async def close(self) -> None: ...


def rate_headers(buckets: Sequence[Bucket]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, allowance in (
        ("requests", tightest([bucket.requests.allowance for bucket in buckets])),
        ("tokens", tightest([bucket.tokens.allowance for bucket in buckets])),
    ):
        if allowance is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(allowance.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(allowance.remaining)
            headers[f"x-ratelimit-reset-{name}"] = format_duration(allowance.reset)
    return headers


def refused(request: ReserveRequest, buckets: Sequence[Bucket]) -> ApiError:
    """The 429 for a reservation that did not fit these buckets (tenant's, key's)."""
    refusal = explain(buckets, request.tokens)
    scope = f"tenant {request.tenant}" if refusal.scope == 0 else f"key {request.key_id}"
    allowed = f"{scope} may use {refusal.limit} {refusal.kind} a minute"
    metadata = {"scope": scope.replace(" ", ":"), "limit": f"{refusal.kind}_per_minute", "value": str(refusal.limit)}
    headers = rate_headers(buckets)
    if refusal.wait is None:
        message = f"{allowed}; this request alone needs up to {request.tokens}"
        return ApiError(Fault.INSUFFICIENT_QUOTA, message, extra_headers=headers, metadata=metadata)
    message = f"{allowed}; try again in {format_duration(refusal.wait)}"
    return ApiError(
        Fault.RATE_LIMIT_EXCEEDED,
        message,
        retry_after=refusal.wait,
        limit_kind=refusal.kind,
        extra_headers=headers,
        metadata=metadata,
    )


def format_duration(seconds: float) -> str:
    """As OpenAI writes them, rounded up to a millisecond: 0s, 120ms, 1s, 8.64s, 6m0s, 1h0m0s."""
    ms = math.ceil(seconds * 1000)
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours}h"] if hours else []
    parts += [f"{minutes}m"] if hours or minutes else []
    return "".join([*parts, f"{ms / 1000:g}s"])
