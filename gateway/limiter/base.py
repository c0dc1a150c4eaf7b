"""Interface of the rate limiters: the gateway reserves before it serves a request, and settles afterwards."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from msgspec import Struct

from gateway.core.bucket import Allowance, Bucket
from gateway.core.budget import LimitRefusal, explain_refusal, tightest_allowance
from gateway.core.errors import ApiError, Fault
from gateway.core.limits import LimitName, Limits, Scope
from gateway.core.tenants import Tenant
from gateway.core.usage import NOTHING, Counts, RowName
from gateway.limiter.usage import ScopeUsage

Mode = Literal["redis", "degraded", "closed", "open"]
"""How limits are enforced. `redis`: exactly, and shared by all gateways. The other modes name the policy that
applies while Redis is unavailable."""

MODE_HEADER = "x-loralane-limiter"
"""Response header with the mode, sent if a request was not limited by Redis."""


class ReserveRequest(Struct, frozen=True):
    """Input of `Limiter.reserve`: a request to admit, and the tokens (prompt and all outputs) to reserve for it. If
    `tokens` is a guess, the limiter may reserve fewer, but at least `least`."""

    request_id: str
    tenant: str
    key_id: str
    tokens: int
    adapter: str
    """Name of the adapter that serves the request, or of the base model."""
    lane: str = ""
    used: Callable[[], Counts] = lambda: NOTHING
    """Function that returns what the request has used so far; called at each lease renewal and at the settlement."""
    least: int | None = None
    """Minimum number of tokens to reserve if `tokens` is a guess, which is cut to the smallest token limit. None means
    that `tokens` is not a guess."""
    is_counted: bool = False
    """True means that this is a further run of a request for a virtual model that was admitted already. The requests
    per minute of its tenant and its key neither count nor refuse it; those of the adapter, which serves the run, do."""

    is_deferred: bool = False
    """True means that the request's sender counts its usage later, and with it the tokens against the limits of the
    day, if it keeps the answer (`DeferredUsage`). `used` must then return nothing. In Redis, the settlement frees the
    day's tokens that were reserved; the limits per minute count what each run used."""

    @property
    def is_batch_line(self) -> bool:
        """True for a line of a batch, which leaves of each limit what interactive requests have lately wanted. Only
        batches defer the count of what they use."""
        return self.is_deferred

    @property
    def num_counted(self) -> int:
        """Number of the first `scopes` (tenant and key) whose requests per minute have counted the request already: 2
        or 0."""
        return 2 if self.is_counted else 0

    @property
    def scopes(self) -> tuple[Scope, Scope, Scope]:
        """The scopes whose limits the request must fit: tenant, key and adapter, in this order."""
        return _scopes(self.tenant, self.key_id, self.adapter)

    @property
    def row(self) -> RowName:
        """The usage row in which the request is counted."""
        return RowName(self.lane, self.key_id, self.adapter)


@lru_cache(maxsize=4096)
def _scopes(tenant: str, key_id: str, adapter: str) -> tuple[Scope, Scope, Scope]:
    return Scope(tenant), Scope(tenant, key=key_id), Scope(tenant, adapter=adapter)


class Grant(Struct, frozen=True):
    """Admission of a request, and the receipt with which the request is settled."""

    lease: str
    """Id of the reservation, unique even if request ids repeat."""
    request: ReserveRequest
    source: Literal["redis", "local"]
    """The limiter that holds the reservation: Redis, or this gateway's memory."""
    buckets: tuple[Bucket, ...] = ()
    """Buckets of the request's scopes as this reservation left them. Empty means that the request is not limited."""
    misses: tuple[tuple[LimitName, ...], ...] = ()
    """For each scope, the limits in shadow mode (not enforced) that would have refused the request."""
    day: int = 0
    """Day of admission in UTC, counted from 1970. The request's usage belongs to this day."""
    reserved: int = 0
    """Tokens that the reservation charged."""
    mode: Mode = "redis"
    """Mode in which this request was limited."""

    @property
    def requests(self) -> Allowance | None:
        """Allowance of requests per minute of the scope with the fewest left. None means that none is enforced."""
        return tightest_allowance([bucket.requests.allowance for bucket in self.buckets])

    @property
    def tokens(self) -> Allowance | None:
        """Allowance of tokens per minute of the scope with the fewest left. None means that none is enforced."""
        return tightest_allowance([bucket.tokens.allowance for bucket in self.buckets])

    @property
    def shadowed(self) -> tuple[tuple[str, str], ...]:
        """Scope kind and limit name of every limit in shadow that would have refused the request."""
        scopes = zip(self.request.scopes, self.misses, strict=False)
        return tuple((scope.kind, name) for scope, names in scopes for name in names)

    def headers(self) -> dict[str, str]:
        """Return headers for responses of any status: of `requests` and `tokens`, where not None,
        x-ratelimit-{limit,remaining,reset}-{requests,tokens}, and the mode header if the mode is not `redis`."""
        return rate_headers(self.buckets) | ({} if self.mode == "redis" else {MODE_HEADER: self.mode})


@dataclass(frozen=True, slots=True)
class StoredLimits:
    """Limits that are stored for one scope, either configured or changed live."""

    scope: Scope
    limits: Limits
    source: Literal["config", "live"]


class Limiter(Protocol):
    """Reserves capacity for requests and settles what they used. Settling is exact and idempotent. A reservation
    occupies a concurrent slot until it is settled or its lease expires, and counts in requests per minute however it
    ends."""

    @property
    def mode(self) -> Mode:
        """Mode in which limits without a policy of their own are enforced now."""

    @property
    def modes(self) -> frozenset[Mode]:
        """Modes in which limits are enforced now; several if limits have different policies and Redis is away."""

    def likely_to_grant(self, request: ReserveRequest) -> bool:
        """Return whether a reservation for `request` is almost certain to be granted. The caller must still reserve,
        but may begin to work on the request meanwhile; that work is wasted if the reservation is refused."""

    async def check_requests(self, request: ReserveRequest) -> None:
        """Raise the ApiError (RATE_LIMIT_EXCEEDED) with which `reserve` would refuse a request now for requests per
        minute or at once, whatever its tokens; charge nothing. Redis is asked only if it last answered that there was
        no room."""

    async def reserve(self, request: ReserveRequest) -> Grant:
        """Charge a request and its tokens to the scopes of tenant, key and adapter, or to none, and return the grant,
        which the caller must settle. A cancelled call charges nothing.

        Raises:
            ApiError: RATE_LIMIT_EXCEEDED with the seconds to wait; INSUFFICIENT_QUOTA if waiting does not help;
                LIMITER_UNAVAILABLE if Redis is needed and away.
        """

    async def settle(self, grant: Grant, actual_tokens: int) -> None:
        """End a grant: correct its charge to `actual_tokens` (an excess over the reservation becomes debt), free its
        slot and count the request's usage."""

    async def configure(self, tenants: Iterable[Tenant]) -> None:
        """Replace the known tenants and publish their limits, except for limits that were changed live. Tenants that
        are not known have no limits."""

    def configure_lazily(self, tenants: Iterable[Tenant]) -> None:
        """Replace the known tenants, as `configure` does, but publish each one's limits before its next reservation."""

    async def drop(self, tenant: str) -> None:
        """Delete a removed tenant's stored limits, configured or changed live, and its counted use. Usage
        rows stay. Raises ApiError: LIMITER_UNAVAILABLE."""

    @property
    def tenants(self) -> Sequence[str]:
        """Names of the tenants whose limits are known, sorted."""

    async def limits(self, scope: Scope) -> Limits:
        """Return the limits in force for a scope: its own if it has any, else its tenant's limits for each key or for
        each adapter."""

    async def entries(self, tenant: str) -> Sequence[StoredLimits]:
        """Return all limits stored for a tenant: first the tenant's, then its keys' and then its adapters'."""

    async def set_limits(self, scope: Scope, changes: Mapping[str, Any]) -> Limits:
        """Change the limits of a scope that `changes` names (fields of `Limits`; None lifts one) from the next request
        on, and return those in force. A scope without its own starts from those in force."""

    async def restore_limits(self, scope: Scope) -> None:
        """Undo live changes of a scope's limits. A key or adapter gets its tenant's limits for each key or adapter."""

    async def forget_use(self, scope: Scope) -> None:
        """Set a scope's counted use of this minute and of today to zero, and forget its refusals. Running requests stay
        counted as running, but their settlement no longer corrects the use."""

    async def usage(self, tenant: str) -> Sequence[ScopeUsage]:
        """Return the usage of each scope that has its own limits or was used today, the tenant's scope first."""

    async def outstanding(self) -> int:
        """Return the number of reservations that are not settled. Reservations of dead gateways are included as long as
        they can still be settled (a day in Redis)."""

    async def trouble(self) -> str:
        """Return why the store of the limits does not serve now, as `StoreError.trouble` does. Empty means that it
        does."""

    async def warning(self) -> str:
        """Return why a store that serves may lose what it keeps, such as by evicting keys. Empty if nothing speaks for
        that."""

    async def close(self) -> None: ...


def new_lease(request: ReserveRequest) -> str:
    """Return a unique lease id that begins with the request id."""
    return f"{request.request_id}.{random.getrandbits(48):012x}"


def rate_headers(buckets: Sequence[Bucket]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, allowance in (
        ("requests", tightest_allowance([bucket.requests.allowance for bucket in buckets])),
        ("tokens", tightest_allowance([bucket.tokens.allowance for bucket in buckets])),
    ):
        if allowance is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(allowance.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(allowance.remaining)
            headers[f"x-ratelimit-reset-{name}"] = format_duration(allowance.reset)
    return headers


def limit_error(request: ReserveRequest, buckets: Sequence[Bucket]) -> ApiError:
    """Return the error (RATE_LIMIT_EXCEEDED, or INSUFFICIENT_QUOTA if waiting does not help) for a refused reservation,
    with limit, wait and x-ratelimit headers. `buckets` are those that `reserve` returned for `request.scopes`."""
    refusal = explain_refusal(buckets, request.tokens, request.num_counted, request.is_batch_line)
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


def _allowed(refusal: LimitRefusal) -> str:
    if refusal.name == "concurrent_requests":
        return f"have {refusal.limit} requests at once"
    if refusal.name == "tokens_per_day":
        return f"use {refusal.limit} tokens a day (UTC), and too few are left"
    return f"use {refusal.limit} {refusal.kind} a minute"


def format_duration(seconds: float) -> str:
    """Format seconds as OpenAI does, rounded up to a millisecond: 0s, 120ms, 1s, 8.64s, 6m0s, 1h0m0s."""
    ms = math.ceil(seconds * 1000)
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours}h"] if hours else []
    parts += [f"{minutes}m"] if hours or minutes else []
    return "".join([*parts, f"{ms / 1000:g}s"])
