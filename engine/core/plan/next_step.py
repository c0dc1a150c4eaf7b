"""Planning of the next step. Planning reads the state and changes nothing; the resulting plan fits that state."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.core.messages.requests import Lane, LaneMode
from engine.core.messages.step import StepPlan
from engine.core.plan.planner import Planner
from engine.core.policy.policies import Policy
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence


def plan_step(state: EngineState, policy: Policy, now: float) -> StepPlan:
    """Return the plan of the next step without changing `state`; `now` is in seconds on the engine's clock. Lane by
    lane, the decodes whose turn it is (see plan/turns.py) advance, then running prompts, and then waiting sequences
    start, until time, tokens, slots or pages run out. Waiting sequences that the policy orders ahead start before
    running prompts advance. Each sequence asks for all its remaining tokens and gets a chunk of the size that the
    step's budget grants. Paused lanes start no sequences. The plan also fetches adapters and prepares grammars for
    waiting sequences. If a suspect request is on trial (see `Sequence.on_trial`) and can be computed, it is computed
    alone, otherwise left out."""
    if state.suspects and (trial := plan_trial(state, policy, now)) is not None:
        return trial
    planner = Planner(state, policy, now)
    starting = [lane for lane in Lane if state.modes[lane] is not LaneMode.PAUSED]
    for lane in Lane:
        planner.enter(lane)
        decodes, prompts = policy.order_running(state, lane)
        _try_each(state, planner.in_turn(decodes), planner.advance)
        if prompts and lane in starting:
            _try_each(state, policy.order_ahead(state, lane, now, prompts), planner.start)
        _try_each(state, prompts, planner.advance)
        if planner.takes_new and lane in starting:
            _try_each(state, policy.order_waiting(state, lane, now), planner.start)
    for lane in starting:
        planner.fetch_ahead(lane, policy.order_fetches(state, lane, now))
        planner.prepare_ahead(lane, policy.order_fetches(state, lane, now))
    return planner.finish()


def _try_each(state: EngineState, sequences: Iterable[Sequence], schedule: Callable[[Sequence], bool]) -> None:
    """Schedule the sequences, in their order, until `schedule` returns False, without suspects on trial."""
    has_suspects = bool(state.suspects)
    for seq in sequences:
        if not (has_suspects and seq.on_trial) and not schedule(seq):
            return


def plan_trial(state: EngineState, policy: Policy, now: float) -> StepPlan | None:
    """Return a plan that computes one suspect request alone; None means that no suspect on trial can be computed now.
    The trial of a running suspect ends before the next trial begins. While a running suspect has to wait for its own
    pending token, the returned plan has no chunks, so that no other request is computed in the same step."""
    on_trial = [seq for seq in state.suspects.values() if seq.on_trial]
    running = [seq for seq in on_trial if seq.id in state.running]
    for seq in running or on_trial:
        planner = Planner(state, policy, now)
        planner.enter(seq.lane)
        if running:
            planner.advance(seq)
        elif state.modes[seq.lane] is not LaneMode.PAUSED:
            planner.start(seq)
        plan = planner.finish()
        if plan.chunks or (running and seq.waits_for_token):
            return plan
    return None
