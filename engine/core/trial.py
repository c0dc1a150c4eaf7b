"""Separate steps for requests that may crash the engine.

A request that crashes an engine process also ends all other requests of that step, and would do so again in the next
process. The crash does not show which request caused it. Each request of the step therefore returns as a suspect, and
its next tokens are computed in steps with no other request: a second crash then identifies the request that caused it.
"""

from __future__ import annotations

from engine.core.draft import Draft
from engine.core.policy import Policy
from engine.core.state import EngineState
from engine.core.types import LaneMode, StepPlan


def plan_trial(state: EngineState, policy: Policy, now: float) -> StepPlan | None:
    """Return a step for one suspect alone; None means that no suspect on trial can be computed now.

    The trial of a running suspect ends before the next trial begins. Where steps are planned ahead and the suspect has
    to wait for its own pending token, the returned plan has no chunks, so that no other request is computed then.
    """
    on_trial = [seq for seq in state.suspects.values() if seq.on_trial]
    running = [seq for seq in on_trial if seq.id in state.running]
    for seq in running or on_trial:
        draft = Draft(state, policy, now)
        draft.enter(seq.lane)
        if running:
            draft.advance(seq)
        elif state.modes[seq.lane] is not LaneMode.PAUSED:
            draft.start(seq)
        plan = draft.finish()
        if plan.chunks or (running and seq.waits_for_token):
            return plan
    return None
