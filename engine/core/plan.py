"""plan_step: what the next step does. Reads the state, changes nothing, and the plan it returns already fits."""

from __future__ import annotations

from engine.core.draft import Draft
from engine.core.policy import Policy
from engine.core.state import EngineState
from engine.core.types import StepPlan


def plan_step(state: EngineState, policy: Policy, now: float) -> StepPlan:
    """Running sequences advance first, then waiting ones start, until tokens, slots or pages run out.

    There is no prefill or decode phase: every sequence asks for its remaining tokens and gets a chunk of at most what
    is left of the budget.
    """
    draft = Draft(state, policy, policy.token_budget(state, now))
    for seq in policy.order_running(state):
        draft.advance(seq)
    for seq in policy.order_waiting(state, now):
        if not draft.start(seq):
            break
    return draft.finish()
