"""What a plan prepares for waiting sequences: adapters to fetch, host copies to free for them, and grammars, within the
memory that tenants may hold."""

from __future__ import annotations

from engine.core.memory.adapters import Adapter, HostCopy
from engine.core.messages.grammar import Grammar
from engine.core.messages.requests import AdapterHash, Lane, Request
from engine.core.messages.step import AdapterFetch
from engine.core.state.engine_state import EngineState
from engine.core.state.grammars import LEAST_BYTES, Stage

BATCH_SHARE = 0.5
"""Share of the memory that the batch lane may fill. Batch requests may hold grammars for hours; the remaining memory is
reserved for the interactive lane."""


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
        self._tiers = state.adapters
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


class GrammarBudget:
    """Chooses the grammars (of structured outputs) that a plan has the executor prepare, as an overlay: the state is
    not changed. A grammar that finds no memory is prepared later; its requests wait in the queue until other requests
    have ended. `prepared` has the grammars whose preparation the plan starts, each with the request whose tenant is
    charged."""

    def __init__(self, state: EngineState) -> None:
        self._grammars = state.grammars
        self._most = state.config.max_preparations
        self._bytes = state.config.grammar_bytes
        self._wanted = self._grammars.count(Stage.WANTED)
        self._under_way = self._grammars.count(Stage.UNDER_WAY)
        self.prepared: dict[Grammar, Request] = {}

    def is_open(self, lane: Lane) -> bool:
        """Return whether a grammar waits to be prepared and this lane may start one more preparation. Batch work may
        not start the last of the `max_preparations` concurrent preparations, unless only one is allowed. Memory is not
        considered."""
        most = self._most if lane is Lane.INTERACTIVE else max(1, self._most - 1)
        return self._under_way + len(self.prepared) < most and self._wanted > len(self.prepared)

    def prepare(self, request: Request, lane: Lane) -> None:
        """Plan the preparation of a request's grammar by adding it to `prepared`, unless the request has none, the
        preparation was planned or started before, or the lane or the tenant may not start one now."""
        grammar = request.params.grammar
        if grammar is None or grammar in self.prepared or self._grammars.stage(grammar) is not Stage.WANTED:
            return
        if self.is_open(lane) and self._has_memory(request, lane):
            self.prepared[grammar] = request

    def _has_memory(self, request: Request, lane: Lane) -> bool:
        """Return whether the request's tenant may have one more grammar in memory: always within the capacity, of which
        batch requests may fill `BATCH_SHARE`, and beyond it by the tenant's share (see `Shares.admits`). Beyond the
        capacity a plan starts at most one preparation for each tenant, because the memory that the tenant will hold
        afterwards is known only when the grammar has been prepared."""
        capacity = self._bytes if lane is Lane.INTERACTIVE else max(1, int(self._bytes * BATCH_SHARE))
        amount = LEAST_BYTES * (len(self.prepared) + 1)
        memory = self._grammars.memory
        if memory.total + amount <= capacity:
            return True
        has_begun = any(other.tenant == request.tenant for other in self.prepared.values())
        return not has_begun and memory.admits(request.tenant, amount, capacity)
