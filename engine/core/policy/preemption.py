"""Order of preemption: which sequences free the most pages at the least cost."""

from __future__ import annotations

from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence

MAX_PREEMPTIONS = 3
"""A sequence that was preempted this often is preempted again only if there is no other victim, because thrashing costs
more than it gains."""
SPARE_PROGRESS = 0.95
"""A sequence that has computed more than this share of its expected tokens is preempted only if there is no other
victim, because it will soon end and free its pages."""


def cheapest_first(state: EngineState, running: list[Sequence]) -> list[Sequence]:
    """Return the sequences in order of preemption: by cost in device seconds * (1 + preemptions) / freed pages, and
    among equals the latest arrival first. Sequences that are nearly done or were preempted `MAX_PREEMPTIONS` times come
    last of all."""
    return sorted(running, key=lambda seq: (_is_spared(seq), _score(state, seq), -seq.request.arrival))


def _is_spared(seq: Sequence) -> bool:
    return seq.preempted.times >= MAX_PREEMPTIONS or seq.num_computed > SPARE_PROGRESS * seq.expected_length


def _score(state: EngineState, seq: Sequence) -> float:
    return _cost(state, seq) * (1 + seq.preempted.times) / _gain(state, seq)


def _cost(state: EngineState, seq: Sequence) -> float:
    """Return the device seconds that it takes to restore a sequence to its current state after a preemption: to compute
    the tokens that the host will not have and to copy pages, with those of an adapter that only it uses."""
    size, ledger = state.config.block_size, state.ledger
    per_page = ledger.model.prices.page
    per_token = ledger.token_prices.prefill or 1.0
    saved, copied = seq.prefix.num_saved, seq.prefix.num_saved
    if state.config.scheduling.preemption == "swap" and state.host.num_pages and seq.shares_pages:
        saved = seq.num_computed // size
        copied = saved + (saved - seq.prefix.num_saved)
    redo = (seq.num_computed - saved * size) * per_token + copied * per_page
    adapter = state.adapters[seq.request.adapter_hash] if seq.request.adapter_hash else None
    return redo + (adapter.num_pages * per_page if adapter and adapter.running == 1 else 0.0)


def _gain(state: EngineState, seq: Sequence) -> int:
    """Return the number of device pages that a preemption frees, at least 1 (for the slot): the pages that no other
    sequence references, and those of the sequence's adapter if no other sequence runs with it."""
    refs = state.pool.refs
    own = sum(refs[page] == 1 for page in seq.pages)
    adapter = state.adapters[seq.request.adapter_hash] if seq.request.adapter_hash else None
    return max(1, own + (adapter.num_pages if adapter and adapter.running == 1 else 0))
