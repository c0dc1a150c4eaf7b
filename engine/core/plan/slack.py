"""Slack: how long a step may last before an interactive token is late."""

from __future__ import annotations

from collections.abc import Container, Iterable

from engine.core.config import goal_of
from engine.core.messages.requests import Lane
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence


def slack_of(state: EngineState, now: float) -> float:
    """Return the seconds from `now` until the first interactive decode is late (at least 0), or until the step's end is
    late for a request that arrives meanwhile: the lane's ITL goal if several parties use it, and otherwise, without
    decodes, its TTFT goal. The time of the step's masks is left out."""
    goals, left = state.config.interactive, times_left(state, now)
    if state.ledger.accounts.is_shared(Lane.INTERACTIVE, now):
        # Another party's next request should not wait for a long step that one party's prompts fill.
        left.append(goals.itl_s)
    elif not left:
        left.append(max(goals.ttft_s, goals.itl_s))
    return max(0.0, min(left) - state.ledger.masks_s(state.running.values()))


def light_slack(state: EngineState, now: float, heavy: Container[str], masked: Iterable[Sequence] = ()) -> float:
    """Return the seconds from `now` until the first decode of a party that is not in `heavy` is late (at least 0), but
    at most the lane's ITL goal, without the time of the masks of those sequences in `masked` that follow grammars."""
    left = min([state.config.interactive.itl_s, *times_left(state, now, heavy)])
    return max(0.0, left - state.ledger.masks_s(masked))


def times_left(state: EngineState, now: float, apart_from: Container[str] = ()) -> list[float]:
    """Return, for each running interactive decode, the seconds from `now` until its next token is late, without those
    of the parties in `apart_from` and those that wait for slow masks, whose tokens no shorter step would make earlier.
    A pending token will have been generated just before this step begins, so that the
    next one is due a full ITL goal later."""
    lane, goal = Lane.INTERACTIVE, state.config.interactive.itl_s
    return [
        goal_of(seq.request.itl, goal) if seq.num_pending else seq.due - now
        for seq in state.running.values()
        if seq.lane is lane
        and seq.num_computed + 1 == len(seq.tokens) + seq.num_pending
        and not seq.waits_for_token
        and not seq.masks_slowly
        and (not apart_from or seq.request.party not in apart_from)
    ]
