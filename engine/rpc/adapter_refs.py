"""Tracks which gateways hold each adapter. The engine unloads an adapter when the last of them releases it."""

from __future__ import annotations

import threading

from engine.core.messages.requests import AdapterHash


class Holders:
    """Records which gateways hold, and thus may use, each adapter, by the id of each gateway's session. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[AdapterHash, set[str]] = {}
        self._now = 0
        """Logical time: number of times that `let_go` has returned True, for the engine to unload an adapter."""
        self._dropped: dict[AdapterHash, int] = {}
        """Logical time at which the engine was last told to unload each adapter."""

    def now(self) -> int:
        """Return the logical time: the number of times that `let_go` has returned True. A caller that begins to load an
        adapter passes it to `hold` afterwards."""
        with self._lock:
            return self._now

    def hold(self, adapter_hash: AdapterHash, gateway: str, since: int) -> bool:
        """Record that a gateway holds an adapter, which was loaded from the logical time `since` on. Return False, and
        record nothing, if the engine was told to unload the adapter after `since`; the caller must load it again."""
        with self._lock:
            if self._dropped.get(adapter_hash, 0) > since:
                return False
            self._held.setdefault(adapter_hash, set()).add(gateway)
            return True

    def let_go(self, adapter_hash: AdapterHash, gateway: str) -> bool:
        """Record that a gateway releases an adapter. Return True if no gateway holds it any more; the caller must then
        have the engine unload it."""
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
