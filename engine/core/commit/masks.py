"""Changes to the engine state around masks that are computed concurrently with the steps (see state/slow_masks.py)."""

from __future__ import annotations

from engine.core.messages.step import StepResult
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence
from engine.core.state.under_way import StepUnderWay


def await_masks(state: EngineState, step: StepUnderWay, result: StepResult) -> None:
    """Take back the tokens that a step did not sample because their masks were not there, and let the sequences whose
    next mask takes too long for a step wait for it. Called once the step's other tokens have been appended."""
    for request_id in result.unsampled:
        seq = step.sequences[request_id]
        if state.is_live(seq):
            _take_back(state, seq)
    for request_id in result.masking:
        seq = step.sequences[request_id]
        if state.running.get(seq.id) is seq:
            state.masks.wait(seq)


def _take_back(state: EngineState, seq: Sequence) -> None:
    """Count a sequence's newest token as not computed, because the step that computed it sampled none after it. A later
    step computes it once more, which overwrites its KV with the same."""
    seq.masks_slowly = True
    if seq.id in state.running:
        seq.num_pending -= 1
        seq.num_computed -= 1
        return
    state.waiting.remove(seq)  # it was preempted since, and the queue counts its tokens
    seq.num_pending -= 1
    state.waiting.add(seq)


def end_mask(state: EngineState, request_id: str, seconds: float) -> Sequence | None:
    """Record that the executor has answered for a mask, which took `seconds` of a core's time, and charge them to the
    tenant as device time. Return the sequence if it still lives, otherwise None."""
    seq = state.masks.end(request_id, seconds, state.now)
    if seq is None:
        return None
    seq.account.charge(seconds, seconds)
    seq.device_seconds += seconds
    return seq if state.is_live(seq) else None
