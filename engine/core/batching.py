"""Request-level batching, for comparison: requests are gathered, start together, and all end before others start."""

from __future__ import annotations

from engine.core.state import EngineState

STATIC_WINDOWS = 20
"""Maximum wait of a static batch for more requests, in windows. Otherwise the last requests of a run, too few for a
full batch, would never start."""


def may_form_batch(state: EngineState, now: float) -> bool:
    """Return whether a new batch may start: nothing runs, and a full batch waits or the oldest request has waited for
    its window."""
    if state.running or not len(state.waiting):
        return False
    rules = state.config.scheduling
    window = rules.window_s * (STATIC_WINDOWS if rules.scheduler == "static" else 1)
    oldest = min(queue[0].request.arrival for lane in state.waiting.lanes.values() for queue in lane.values())
    return len(state.waiting) >= state.config.max_seqs or now - oldest >= window
