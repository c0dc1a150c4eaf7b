"""Cache of the last known state of limits. If they have plenty of room, work on a request can begin before Redis has
answered its reservation."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.budget import Bucket
from gateway.core.limits import Scope
from gateway.limiter.base import ReserveRequest

SHARE = 0.5
"""Share of a limit that may be in use. The other half is for requests that other gateways admit meanwhile."""


class Room:
    """Buckets of each scope as the last grant left them. They are dropped when the next reservation is requested."""

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
        """Return whether all scopes of a request are known to have plenty of room for it."""
        heard = [self._heard.get(scope) for scope in request.scopes]
        return all(bucket is not None and bucket.is_roomy(request.tokens, SHARE) for bucket in heard)
