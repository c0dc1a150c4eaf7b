"""A plan's use of the host memory for adapters: which adapters are fetched, and which copies are freed for them."""

from __future__ import annotations

from engine.core.memory.adapters import Adapter, HostCopy
from engine.core.messages.requests import AdapterHash, Lane
from engine.core.messages.step import AdapterFetch
from engine.core.state.engine_state import EngineState


class FetchBudget:
    """Plans adapter fetches within the capacity of host memory, as an overlay: the state is not changed. Bytes are
    reserved when a fetch is planned, so that adapters in host memory and those being fetched never exceed the capacity.

    Attributes:
        fetches: fetches that this plan starts.
        dropped: adapters whose copy in host memory this plan frees.
        kept: adapters whose copy must stay because this plan, or a waiting sequence that it has looked at, needs it.
    """

    def __init__(self, state: EngineState) -> None:
        self._adapters = state.adapters
        self._tiers = state.tiers
        self._free = state.host_bytes_free
        self._most = state.config.max_fetches
        self.fetches: dict[AdapterHash, AdapterFetch] = {}
        self.dropped: dict[AdapterHash, None] = {}
        self.kept: set[AdapterHash] = set()

    def is_open(self, lane: Lane) -> bool:
        """Return whether there is a missing adapter that is not fetched yet, and this lane may start one more fetch.
        Batch work may not start the last of the `max_fetches` concurrent fetches, unless only one is allowed."""
        most = self._most if lane is Lane.INTERACTIVE else max(1, self._most - 1)
        under_way = len(self._tiers.fetching) + len(self.fetches)
        return under_way < most and len(self._tiers.missing) > len(self.fetches)

    def is_held(self, adapter: Adapter) -> bool:
        """Return whether an adapter is in host memory and this plan does not free its copy."""
        return adapter.host is HostCopy.PRESENT and adapter.adapter_hash not in self.dropped

    def fetch(self, adapter: Adapter, *, is_old: bool) -> None:
        """Plan to read an adapter into host memory, freeing copies of other adapters if necessary. Does nothing if that
        does not suffice or if the fetch is planned already. `is_old` means that a request has waited so long that
        copies which other waiting requests need may be freed."""
        if adapter.adapter_hash in self.fetches or not self._make_room(adapter.num_bytes, is_old=is_old):
            return
        self._free -= adapter.num_bytes
        self.fetches[adapter.adapter_hash] = AdapterFetch(adapter.adapter_hash, adapter.path, adapter.num_bytes)

    def drop_closed(self) -> None:
        """Plan to free the host copies of dropped adapters that have no live requests."""
        for adapter_hash in self._tiers.closing:
            adapter = self._adapters[adapter_hash]
            if not adapter.live and self.is_held(adapter):
                self.dropped[adapter_hash] = None

    def cancelled(self) -> tuple[AdapterHash, ...]:
        """Return the adapters whose fetch this plan shall cancel: those whose fetch is under way, not cancelled yet,
        and that no live request needs any more."""
        under_way = (self._adapters[adapter_hash] for adapter_hash in self._tiers.fetching)
        return tuple(a.adapter_hash for a in under_way if not a.live and a.host is HostCopy.FETCHING)

    def _make_room(self, num_bytes: int, *, is_old: bool) -> bool:
        """Plan to free the host copies of least worth until `num_bytes` bytes are free. Returns False, and frees
        nothing, if the copies that may be freed are not enough. Copies that a waiting request needs may be freed only
        if `is_old`."""
        chosen: list[AdapterHash] = []
        gain = self._free
        for adapter_hash in self._tiers.hosted:
            if gain >= num_bytes:
                break
            adapter = self._adapters[adapter_hash]
            is_free = adapter_hash not in self.kept and adapter_hash not in self.dropped
            if is_free and (is_old or adapter.live == adapter.running):
                chosen.append(adapter_hash)
                gain += adapter.num_bytes
        if gain < num_bytes:
            return False
        self.dropped.update(dict.fromkeys(chosen))
        self._free = gain
        return True
