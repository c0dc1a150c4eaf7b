"""What a plan does with host memory: which adapters are read into it, and which copies leave it for them."""

from __future__ import annotations

from engine.core.adapters import Adapter, HostCopy
from engine.core.state import EngineState
from engine.core.types import AdapterFetch, AdapterId, Lane


class FetchBudget:
    """An overlay over the host tier of adapters, which it leaves as it is.

    Bytes are reserved when a fetch is planned, so that what is in host memory and what is on its way there never
    exceed the bound together.

    Attributes:
        fetches: begun by this plan.
        dropped: copies it gives up.
        kept: adapters whose copy it needs, and those of waiting sequences already looked at.
    """

    def __init__(self, state: EngineState) -> None:
        self._adapters = state.adapters
        self._tiers = state.tiers
        self._free = state.host_bytes_free
        self._most = state.config.max_fetches
        self.fetches: dict[AdapterId, AdapterFetch] = {}
        self.dropped: dict[AdapterId, None] = {}
        self.kept: set[AdapterId] = set()

    def is_open(self, lane: Lane) -> bool:
        """Somebody waits for a fetch, and one more may be under way for this lane."""
        most = self._most if lane is Lane.INTERACTIVE else max(1, self._most - 1)
        under_way = len(self._tiers.fetching) + len(self.fetches)
        return under_way < most and len(self._tiers.missing) > len(self.fetches)

    def is_held(self, adapter: Adapter) -> bool:
        """Its copy is there, and stays."""
        return adapter.host is HostCopy.PRESENT and adapter.id not in self.dropped

    def fetch(self, adapter: Adapter, *, is_old: bool) -> None:
        """Begins to read an adapter, if there is room for it; who has waited long takes it from those behind."""
        if adapter.id in self.fetches or not self._make_room(adapter.num_bytes, is_old=is_old):
            return
        self._free -= adapter.num_bytes
        self.fetches[adapter.id] = AdapterFetch(adapter.id, adapter.path, adapter.num_bytes)

    def drop_closed(self) -> None:
        """Copies of dropped adapters are given up as soon as nobody needs them."""
        for name in self._tiers.closing:
            adapter = self._adapters[name]
            if not adapter.live and self.is_held(adapter):
                self.dropped[name] = None

    def cancelled(self) -> tuple[AdapterId, ...]:
        """Fetches under way that nobody waits for any more."""
        under_way = (self._adapters[name] for name in self._tiers.fetching)
        return tuple(a.id for a in under_way if not a.live and a.host is HostCopy.FETCHING)

    def _make_room(self, num_bytes: int, *, is_old: bool) -> bool:
        """Gives up the copies that are worth least. False, with nothing done, if they are not enough."""
        chosen: list[AdapterId] = []
        gain = self._free
        for name in self._tiers.hosted:
            if gain >= num_bytes:
                break
            adapter = self._adapters[name]
            if name not in self.kept and name not in self.dropped and (is_old or adapter.live == adapter.running):
                chosen.append(name)
                gain += adapter.num_bytes
        if gain < num_bytes:
            return False
        self.dropped.update(dict.fromkeys(chosen))
        self._free = gain
        return True
