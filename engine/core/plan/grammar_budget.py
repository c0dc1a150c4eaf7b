"""Grammar preparations that a plan starts, within the memory that tenants may hold."""

from __future__ import annotations

from engine.core.messages.grammar import Grammar
from engine.core.messages.requests import Lane, Request
from engine.core.state.engine_state import EngineState
from engine.core.state.grammars import LEAST_BYTES, Stage

BATCH_SHARE = 0.5
"""Share of the memory that the batch lane may fill. Batch requests may hold grammars for hours; the remaining memory is
reserved for the interactive lane."""


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
