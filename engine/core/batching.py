"""Request-level batching, kept for comparison: requests are gathered, start together and all end before the next do."""

from __future__ import annotations

from engine.core.state import EngineState

STATIC_WINDOWS = 20
"""Windows that a static batch, which waits to be full, waits at most: or a run's last requests would never start."""


def may_form_batch(state: EngineState, now: float) -> bool:
    """Nothing runs, and either a whole batch waits or the first of it has waited its window."""
    if state.running or not len(state.waiting):
        return False
    rules = state.config.scheduling
    window = rules.window_s * (STATIC_WINDOWS if rules.scheduler == "static" else 1)
    oldest = min(queue[0].request.arrival for lane in state.waiting.lanes.values() for queue in lane.values())
    return len(state.waiting) >= state.config.max_seqs or now - oldest >= window
