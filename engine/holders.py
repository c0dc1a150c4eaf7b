"""Which gateways want an adapter kept: an engine lets go of one when the last of them does."""

from __future__ import annotations

import threading

from engine.core.types import AdapterId


class Holders:
    """Thread-safe. Gateways are told apart by an id that each gives its session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[AdapterId, set[str]] = {}
        self._now = 0
        self._dropped: dict[AdapterId, int] = {}
        """When the engine was last told to let go of each."""

    def now(self) -> int:
        """A moment, for `hold`."""
        with self._lock:
            return self._now

    def hold(self, adapter: AdapterId, gateway: str, since: int) -> bool:
        """False: the engine was told to let go of it since it began to be read for this gateway; read it again."""
        with self._lock:
            if self._dropped.get(adapter, 0) > since:
                return False
            self._held.setdefault(adapter, set()).add(gateway)
            return True

    def let_go(self, adapter: AdapterId, gateway: str) -> bool:
        """True: nobody wants it any more, and the engine is to be told."""
        with self._lock:
            holders = self._held.get(adapter, set())
            holders.discard(gateway)
            if holders:
                return False
            self._held.pop(adapter, None)
            self._now += 1
            self._dropped[adapter] = self._now
            return True

    def leave(self, gateway: str) -> None:
        """A gateway is gone. What only it held stays, unused, until another gateway lets go of it."""
        with self._lock:
            for holders in self._held.values():
                holders.discard(gateway)
