"""Steps of their own for requests that may crash the engine.

A request that makes an engine process crash takes every other request of that step along, and would do so again in the
next process. Which of them it was, nothing says. So each request that was in the step comes back as suspect, and its
next tokens are computed in steps that it has to itself: a second crash then names the request that caused it.
"""

from __future__ import annotations

from engine.core.draft import Draft
from engine.core.policy import Policy
from engine.core.state import EngineState
from engine.core.types import LaneMode, StepPlan


def plan_trial(state: EngineState, policy: Policy, now: float) -> StepPlan | None:
    """Return a step for one suspect alone; None means that no suspect on trial can be computed now.

    The trial of a suspect that runs already ends before the next one begins. While steps are planned ahead, the step
    behind a trial's is empty where the trial has to wait for its own token, so that no other request is computed then.
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
