"""Bounds the stored conversations that requests of one tenant continue at the same time."""

from __future__ import annotations

import weakref
from collections import Counter

from gateway.core.errors import ApiError, Fault
from gateway.requests.types import Chat

MOST_HELD_BYTES = 64 * 2**20
"""Maximum bytes of one tenant's conversations in this process, as they are stored: eight of the longest. A request of
200 bytes brings one into memory before any limit of the tenant applies and, in the background, holds no connection."""


class HeldConversations:
    """Limits, for each tenant, the bytes of the stored conversations that running requests have read into memory to
    continue them."""

    def __init__(self, most: int = MOST_HELD_BYTES) -> None:
        """`most` is the maximum for one tenant, in bytes. A single conversation may have more."""
        self._most = most
        self._held: Counter[str] = Counter()

    def hold(self, tenant: str, num_bytes: int, chat: Chat) -> None:
        """Count a conversation of `num_bytes` bytes until `chat`, which continues it, is garbage-collected. Raises
        ApiError (RATE_LIMIT_EXCEEDED): the tenant's other conversations leave no room for it."""
        if self._held[tenant] and self._held[tenant] + num_bytes > self._most:
            message = f"your running requests continue conversations of {self._held[tenant]:,} bytes; try again later"
            raise ApiError(Fault.RATE_LIMIT_EXCEEDED, message, retry_after=1.0, limit_kind="requests")
        self._held[tenant] += num_bytes
        weakref.finalize(chat, self._free, tenant, num_bytes).atexit = False

    def _free(self, tenant: str, num_bytes: int) -> None:
        self._held[tenant] -= num_bytes
        if not self._held[tenant]:
            del self._held[tenant]
