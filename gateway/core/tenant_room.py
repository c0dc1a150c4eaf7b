"""Bounds what the requests of one tenant hold at the same time in a gateway process, such as memory or streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.core.errors import ApiError, Fault


class TenantRoom:
    """Counts what the requests of each tenant hold, and refuses a request that would hold more than there is room
    for."""

    def __init__(self, most: int, refusal: str) -> None:
        """`most` is the maximum for one tenant; a single request may hold more than that. `refusal` is the error
        message of further requests, in which `{held}` stands for the amount that the tenant's requests hold."""
        self.most = most
        self._refusal = refusal
        self._held: Counter[str] = Counter()

    def take(self, tenant: str, amount: int = 1) -> None:
        """Count `amount` as held by a request of the tenant, until `free`. Raises ApiError (RATE_LIMIT_EXCEEDED): the
        tenant's other requests leave no room for it."""
        held = self._held[tenant]
        if held and held + amount > self.most:
            message = self._refusal.format(held=f"{held:,}")
            raise ApiError(Fault.RATE_LIMIT_EXCEEDED, message, retry_after=1.0, limit_kind="requests")
        self._held[tenant] = held + amount

    def free(self, tenant: str, amount: int = 1) -> None:
        """Count an amount that was taken as no longer held."""
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]

    @contextmanager
    def taken(self, tenant: str, amount: int = 1) -> Iterator[None]:
        """Take an amount before the block and free it after the block. Raises what `take` raises."""
        self.take(tenant, amount)
        try:
            yield
        finally:
            self.free(tenant, amount)
