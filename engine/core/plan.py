"""Planning of the next step. Planning reads the state and changes nothing; the resulting plan fits that state."""

from __future__ import annotations

from engine.core.draft import Draft
from engine.core.policy import Policy
from engine.core.state import EngineState
from engine.core.trial import plan_trial
from engine.core.types import Lane, LaneMode, StepPlan


def plan_step(state: EngineState, policy: Policy, now: float) -> StepPlan:
    """Return the plan of the next step.

    Lane by lane, running sequences advance and then waiting sequences start, until time, tokens, slots or pages run
    out. There are no separate prefill and decode phases: each sequence asks for all its remaining tokens and gets a
    chunk of the size that the step's budget grants.
    """
    if state.suspects and (trial := plan_trial(state, policy, now)) is not None:
        return trial
    has_suspects = bool(state.suspects)
    draft = Draft(state, policy, now)
    starting = [lane for lane in Lane if state.modes[lane] is not LaneMode.PAUSED]
    for lane in Lane:
        draft.enter(lane)
        for seq in policy.order_running(state, lane):
            if not (has_suspects and seq.on_trial):
                draft.advance(seq)
        for seq in policy.order_waiting(state, lane, now) if draft.takes_new and lane in starting else ():
            if not (has_suspects and seq.on_trial) and not draft.start(seq):
                break
    for lane in starting:
        draft.fetch_ahead(lane, policy.order_fetches(state, lane, now))
        draft.prepare_ahead(lane, policy.order_fetches(state, lane, now))
    return draft.finish()
