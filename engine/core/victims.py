"""Whose preemption gives most for least."""

from __future__ import annotations

from engine.core.sequence import Sequence
from engine.core.state import EngineState


def cheapest_first(state: EngineState, running: list[Sequence]) -> list[Sequence]:
    """By cost * (1 + preemptions) / gain; the younger first among equals; those nearly done or
    preempted too often come last of all."""
    return sorted(running, key=lambda seq: (_is_spared(state, seq), _score(state, seq), -seq.request.arrival))


def _is_spared(state: EngineState, seq: Sequence) -> bool:
    rules = state.config.scheduling
    if seq.num_preemptions >= rules.max_preemptions:
        return True
    return seq.num_computed > rules.spare_progress * seq.expected_length


def _score(state: EngineState, seq: Sequence) -> float:
    return _cost(state, seq) * (1 + seq.num_preemptions) / _gain(state, seq)


def _cost(state: EngineState, seq: Sequence) -> float:
    """Device seconds it takes to bring the sequence back where it is."""
    size, ledger = state.config.block_size, state.ledger
    per_page = ledger.model.prices.page
    per_token = ledger.prefill_price or 1.0
    saved, copied = seq.num_saved, seq.num_saved
    if state.config.scheduling.preemption == "swap" and state.host.num_pages:
        saved = seq.num_computed // size
        copied = saved + (saved - seq.num_saved)
    redo = (seq.num_computed - saved * size) * per_token + copied * per_page
    adapter = state.adapters[seq.request.adapter] if seq.request.adapter else None
    return redo + (adapter.num_pages * per_page if adapter and adapter.running == 1 else 0.0)


def _gain(state: EngineState, seq: Sequence) -> int:
    """Pages nobody else references, and its adapter's if it is the last to use it; at least one, for its slot."""
    refs = state.pool.refs
    own = sum(refs[page] == 1 for page in seq.pages)
    adapter = state.adapters[seq.request.adapter] if seq.request.adapter else None
    return max(1, own + (adapter.num_pages if adapter and adapter.running == 1 else 0))
