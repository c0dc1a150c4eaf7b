"""What the limits had left when they were last heard of: where it is plenty, a request need not wait to be told so."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.budget import Bucket
from gateway.core.limits import Scope
from gateway.limiter.base import ReserveRequest

SHARE = 0.5
"""Of a limit that may be in use: the other half is for what other gateways let in meanwhile."""


class Room:
    """In scopes that a reservation was granted in, until the next is asked for."""

    def __init__(self) -> None:
        self._heard: dict[Scope, Bucket] = {}

    def hear(self, scopes: Sequence[Scope], buckets: Sequence[Bucket]) -> None:
        self._heard.update(zip(scopes, buckets, strict=True))

    def forget(self, scopes: Sequence[Scope]) -> None:
        for scope in scopes:
            self._heard.pop(scope, None)

    def drop(self, tenant: str) -> None:
        self.forget([scope for scope in self._heard if scope.tenant == tenant])

    def has(self, request: ReserveRequest) -> bool:
        """Whether there is plenty for it. Nobody knows that of what was never heard of."""
        heard = [self._heard.get(scope) for scope in request.scopes]
        return all(bucket is not None and bucket.is_roomy(request.tokens, SHARE) for bucket in heard)
