"""Bounds the streams by which tenants follow their batches and stored responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.core.errors import ApiError, Fault

MOST_WATCHES = 128
"""Maximum streams of one tenant in this process. Each reads Redis up to 10 times a second for a batch, and up to 20
times for a response, and no other limit of the tenant applies to it."""


class TenantWatches:
    """Counts the open streams of each tenant, over HTTP and gRPC together."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @contextmanager
    def watch(self, tenant: str) -> Iterator[None]:
        """Count a stream of the tenant as open during the block. Raises ApiError (RATE_LIMIT_EXCEEDED): the tenant has
        MOST_WATCHES open streams."""
        if self._open[tenant] >= MOST_WATCHES:
            message = (
                f"you have {self._open[tenant]} open streams of batches and stored responses here, the maximum; "
                "close some, or get the batch or response itself from time to time"
            )
            raise ApiError(Fault.RATE_LIMIT_EXCEEDED, message, retry_after=1.0, limit_kind="requests")
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]
