"""How hard batch deadlines press: the device time they need, against what batch work has been getting."""

from __future__ import annotations

from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.types import Lane

INTERVAL_S = 0.25
SECONDS_PER_SEQUENCE = 1e-4
"""Looking at a sequence takes a microsecond or two, so looking at all of them this often takes 2 % of the time."""


def update_need(state: EngineState, now: float) -> None:
    """Sets `ledger.need`, now and then: the largest, over deadlines, of work due by then / time left / share given.

    Work whose deadline has passed presses no more: it has lost already, and must not take others with it. Nor does what
    waits in a paused lane.
    """
    ledger = state.ledger
    if now < ledger.need_known_until:
        return
    due = _with_deadlines(state, now)
    ledger.need_known_until = now + max(INTERVAL_S, SECONDS_PER_SEQUENCE * len(due))
    ledger.need = _need(state, due, now)


def _with_deadlines(state: EngineState, now: float) -> list[tuple[float, Sequence]]:
    running = [seq for seq in state.running.values() if seq.request.deadline is not None]
    waiting = state.waiting.urgent if state.may_start(Lane.BATCH) else ()
    due = [(seq.request.deadline or 0.0, seq) for seq in (*waiting, *running)]
    return sorted((item for item in due if item[0] > now), key=lambda item: item[0])


def _need(state: EngineState, due: list[tuple[float, Sequence]], now: float) -> float:
    rules, ledger = state.config.scheduling, state.ledger
    rate = max(ledger.batch_share, rules.batch_floor, 1e-9)
    need = work = 0.0
    for deadline, seq in due:
        work += ledger.work_left(seq)
        need = max(need, work / ((deadline - now) * (1 - rules.deadline_margin) * rate))
    return need
