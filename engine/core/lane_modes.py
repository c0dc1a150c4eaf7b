"""Operations of an operator: set the mode or the goals of a lane, and cancel requests. They run between two steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.core.commit import finish_early
from engine.core.config import LaneGoals
from engine.core.state import EngineState
from engine.core.types import ErrorCode, Lane, LaneMode, Refusal


def set_mode(state: EngineState, lane: Lane, mode: LaneMode) -> None:
    """Set the mode of a lane in the state, effective from the next plan on. Raises ValueError if the policy has one
    queue for all lanes, so that no single lane can be stopped."""
    policy = state.config.scheduling.policy
    if policy != "lanes":
        raise ValueError(f"scheduling.policy {policy} has one queue for all lanes")
    state.modes[lane] = mode


def set_goals(state: EngineState, lane: Lane, goals: LaneGoals) -> None:
    """Replace the goals of a lane in `state.config`. Due times of tokens already expected do not change."""
    interactive, batch = (goals if each is lane else state.config.goals[each] for each in Lane)
    state.config = replace(state.config, interactive=interactive, batch=batch)


def cancel(state: EngineState, request_ids: Iterable[str]) -> int:
    """End the live requests among `request_ids`, waiting or running, with an error event of code CANCELLED. Returns how
    many were ended: unknown ids are ignored, and duplicate ids count once."""
    found = [state.sequences[request_id] for request_id in dict.fromkeys(request_ids) if request_id in state.sequences]
    for seq in found:
        finish_early(state, seq, Refusal(ErrorCode.CANCELLED, "an administrator cancelled the request"))
    return len(found)
