"""Tracks which gateways hold each adapter. The engine unloads an adapter when the last of them releases it."""

from __future__ import annotations

import threading

from engine.core.types import AdapterHash


class Holders:
    """The gateways that hold each adapter, by the id that each gateway gives its session. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[AdapterHash, set[str]] = {}
        self._now = 0
        """Logical time: number of times that the engine was told to unload an adapter."""
        self._dropped: dict[AdapterHash, int] = {}
        """Logical time at which the engine was last told to unload each adapter."""

    def now(self) -> int:
        """Return the logical time, to be passed to `hold`."""
        with self._lock:
            return self._now

    def hold(self, adapter_hash: AdapterHash, gateway: str, since: int) -> bool:
        """Record that a gateway holds an adapter that it began to load at `since`.

        Returns:
            False if the engine was told to unload the adapter since then; the caller must load it again.
        """
        with self._lock:
            if self._dropped.get(adapter_hash, 0) > since:
                return False
            self._held.setdefault(adapter_hash, set()).add(gateway)
            return True

    def let_go(self, adapter_hash: AdapterHash, gateway: str) -> bool:
        """Record that a gateway releases an adapter. Returns True if no gateway holds it any more, so that the engine
        must be told to unload it."""
        with self._lock:
            holders = self._held.get(adapter_hash, set())
            holders.discard(gateway)
            if holders:
                return False
            self._held.pop(adapter_hash, None)
            self._now += 1
            self._dropped[adapter_hash] = self._now
            return True

    def leave(self, gateway: str) -> None:
        """Forget a gateway whose session has ended. An adapter that only this gateway held stays loaded, unused, until
        another gateway releases it."""
        with self._lock:
            for holders in self._held.values():
                holders.discard(gateway)
