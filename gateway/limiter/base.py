"""Rate limits as the rest of the gateway sees them: reserve before the work, settle after it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from msgspec import Struct

from gateway.core.budget import Allowance, Bucket, Refusal, explain, tightest
from gateway.core.errors import ApiError, Fault
from gateway.core.limits import LimitName, Limits, Scope
from gateway.core.tenants import Tenant
from gateway.core.usage import NOTHING, Counts, RowName
from gateway.limiter.usage import ScopeUsage

Mode = Literal["redis", "degraded", "closed", "open"]
"""redis: shared and exact; the others: a policy, at work."""

MODE_HEADER = "x-loralane-limiter"
"""Of answers to requests that were limited otherwise than by Redis."""


class ReserveRequest(Struct, frozen=True):
    """One request wants in, and may use up to `tokens` tokens (prompt and all outputs)."""

    request_id: str
    tenant: str
    key_id: str
    tokens: int
    adapter: str
    """What serves it: an adapter, or the base model by its own name."""
    lane: str = ""
    used: Callable[[], Counts] = lambda: NOTHING
    """What it has used so far: asked whenever its lease is renewed, and when it is settled."""
    least: int | None = None
    """What it needs at any rate, where `tokens` is a guess: that yields to the smallest bucket. None: it is none."""

    @property
    def scopes(self) -> tuple[Scope, Scope, Scope]:
        """Whose limits it must fit: tenant's, key's, adapter's."""
        return _scopes(self.tenant, self.key_id, self.adapter)

    @property
    def row(self) -> RowName:
        """Where its usage is counted."""
        return RowName(self.lane, self.key_id, self.adapter)


@lru_cache(maxsize=4096)
def _scopes(tenant: str, key_id: str, adapter: str) -> tuple[Scope, Scope, Scope]:
    return Scope(tenant), Scope(tenant, key=key_id), Scope(tenant, adapter=adapter)


class Grant(Struct, frozen=True):
    """Leave to run, and the receipt that settles it."""

    lease: str
    """Unique to this reservation, even where request ids repeat."""
    request: ReserveRequest
    source: Literal["redis", "local"]
    """Whose books it stands in."""
    buckets: tuple[Bucket, ...] = ()
    """Of its scopes, as this reservation left them; empty: not limited."""
    misses: tuple[tuple[LimitName, ...], ...] = ()
    """Of each scope, limits in shadow that would have refused it."""
    day: int = 0
    """On which it was admitted, since 1970 in UTC: its usage counts there."""
    reserved: int = 0
    """Tokens that were charged."""
    mode: Mode = "redis"
    """How it was limited."""

    @property
    def requests(self) -> Allowance | None:
        """Of the scope with fewest requests left; None: not limited."""
        return tightest([bucket.requests.allowance for bucket in self.buckets])

    @property
    def tokens(self) -> Allowance | None:
        """Of the scope with fewest tokens left; None: not limited."""
        return tightest([bucket.tokens.allowance for bucket in self.buckets])

    @property
    def shadowed(self) -> tuple[tuple[str, str], ...]:
        """Kind of the scope and name of every limit in shadow that would have refused it."""
        scopes = zip(self.request.scopes, self.misses, strict=False)
        return tuple((scope.kind, name) for scope, names in scopes for name in names)

    def headers(self) -> dict[str, str]:
        """x-ratelimit-{limit,remaining,reset}-{requests,tokens}, for responses of any status; the mode if it is not
        the usual one."""
        return rate_headers(self.buckets) | ({} if self.mode == "redis" else {MODE_HEADER: self.mode})


@dataclass(frozen=True, slots=True)
class LimitEntry:
    """Limits as they were written down for one scope."""

    scope: Scope
    limits: Limits
    source: Literal["config", "live"]


class Limiter(Protocol):
    """All calls may run concurrently. Settling is exact and idempotent: the first of settle and refund counts.

    A reservation takes one of the requests at once until it is settled; should its gateway die, until its lease ends.
    What a request used is counted by the very step that settles it; a refund counts nothing.
    """

    @property
    def mode(self) -> Mode:
        """Of limits that say nothing of their own."""

    @property
    def modes(self) -> frozenset[Mode]:
        """Of all limits in force."""

    def foresees(self, request: ReserveRequest) -> bool:
        """Whether a reservation, which must follow, is as good as granted: work on it may begin while it is asked for,
        and is for nothing should it be refused."""

    async def reserve(self, request: ReserveRequest) -> Grant:
        """Charges one request and `tokens` tokens to every scope, or charges nothing. Cancelled, it leaves nothing
        charged in the end.

        Raises:
            ApiError: RATE_LIMIT_EXCEEDED with the true wait, INSUFFICIENT_QUOTA when no wait can help,
                LIMITER_UNAVAILABLE, never RATE_LIMIT_EXCEEDED, where it is our fault that it cannot be admitted.
        """

    async def settle(self, grant: Grant, actual_tokens: int) -> None:
        """Corrects the reservation to what was used: the rest is given back, an excess becomes debt."""

    async def refund(self, grant: Grant) -> None:
        """Gives back everything, the request included: for failures of ours."""

    async def configure(self, tenants: Iterable[Tenant]) -> None:
        """Publishes configured limits, leaving those changed live as they are. Unknown tenants have none."""

    def know(self, tenants: Iterable[Tenant]) -> None:
        """As `configure`, but limits that are new are published before the tenant's next reservation."""

    async def drop(self, tenant: str) -> None:
        """Forgets limits that were changed live, and what was used: the tenant is gone."""

    @property
    def tenants(self) -> Sequence[str]:
        """Names of those whose limits are known, in order."""

    async def limits(self, scope: Scope) -> Limits:
        """What is in force."""

    async def entries(self, tenant: str) -> Sequence[LimitEntry]:
        """Everything written down for a tenant: its own limits first, then those of its keys and adapters."""

    async def set_limits(self, scope: Scope, changes: Mapping[str, Any]) -> Limits:
        """Changes the limits named, by fields of `Limits`, from the next request on; None lifts one.

        A scope without limits of its own begins with what is in force for it. Outlasts restarts. Returns what is in
        force then.
        """

    async def restore_limits(self, scope: Scope) -> None:
        """Returns to the configured limits; a key or an adapter, to what its tenant gives each."""

    async def forget_use(self, scope: Scope) -> None:
        """As if nothing had been used, this minute and today. What runs goes on running."""

    async def usage(self, tenant: str) -> Sequence[ScopeUsage]:
        """Of every scope with limits of its own, or use today; the tenant's first."""

    async def outstanding(self) -> int:
        """Reservations not settled yet: 0 when nothing runs."""

    async def ping(self) -> bool:
        """Whether the shared books can be reached."""

    async def close(self) -> None: ...


def new_lease(request: ReserveRequest) -> str:
    """Unique, and still telling which request it is."""
    return f"{request.request_id}.{random.getrandbits(48):012x}"


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
    """The 429 for a reservation that did not fit the buckets of its scopes."""
    refusal = explain(buckets, request.tokens)
    scope = request.scopes[refusal.scope]
    allowed = f"{str(scope).replace(':', ' ', 1)} may {_allowed(refusal)}"
    metadata = {"scope": str(scope), "limit": refusal.name, "value": str(refusal.limit)}
    headers = rate_headers(buckets)
    if refusal.wait is None:
        message = f"{allowed}; this request alone needs up to {request.tokens}"
        if refusal.name == "tokens_per_day" and request.tokens <= refusal.limit:
            metadata["renews"] = "00:00 UTC"
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


def _allowed(refusal: Refusal) -> str:
    if refusal.name == "concurrent_requests":
        return f"have {refusal.limit} requests at once"
    if refusal.name == "tokens_per_day":
        return f"use {refusal.limit} tokens a day (UTC), and too few are left"
    return f"use {refusal.limit} {refusal.kind} a minute"


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
