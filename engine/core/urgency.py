"""Urgency of batch deadlines: the device time that they need, relative to what batch work has been getting."""

from __future__ import annotations

from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.types import Lane

INTERVAL_S = 0.25
SECONDS_PER_SEQUENCE = 1e-4
"""Minimum seconds between two updates per sequence with a deadline (and `INTERVAL_S` in total). Looking at a sequence
takes one or two microseconds, so that the updates take about 2 % of the time at most."""


def update_need(state: EngineState, now: float) -> None:
    """Update `ledger.need` if the last update is long enough ago.

    The need is the maximum over all deadlines of (work due by the deadline / time left / share of device time that
    batch work has been getting). Work whose deadline has passed does not count, because it is late already and must
    not make other work late. Waiting work of a paused lane does not count either.
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
