"""What an operator may do to a whole lane, and to single requests: pause, drain, promise, cancel. Called between two
steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.core.commit import finish_early
from engine.core.config import LaneGoals
from engine.core.state import EngineState
from engine.core.types import ErrorCode, Lane, LaneMode, Refusal


def set_mode(state: EngineState, lane: Lane, mode: LaneMode) -> None:
    """From the next plan on. Raises ValueError: a policy with one queue for all has no lane to stop."""
    policy = state.config.scheduling.policy
    if policy != "lanes":
        raise ValueError(f"scheduling.policy {policy} has one queue for all lanes")
    state.modes[lane] = mode


def set_goals(state: EngineState, lane: Lane, goals: LaneGoals) -> None:
    """What the lane promises from now on; tokens that are due already stay due when they were."""
    interactive, batch = (goals if each is lane else state.config.goals[each] for each in Lane)
    state.config = replace(state.config, interactive=interactive, batch=batch)


def cancel(state: EngineState, request_ids: Iterable[str]) -> int:
    """Ends those that still live, wherever they are; returns how many did. Naming one twice ends it once."""
    found = [state.sequences[request_id] for request_id in dict.fromkeys(request_ids) if request_id in state.sequences]
    for seq in found:
        finish_early(state, seq, Refusal(ErrorCode.CANCELLED, "an administrator cancelled the request"))
    return len(found)
