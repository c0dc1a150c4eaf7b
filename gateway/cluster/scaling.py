"""Decides, purely, how many engines a base model should have, by each lane's predicted delay over its goal: it shows a
shortage before requests are late, which utilisation by batch work does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from engine.core.config import LaneGoals
from engine.core.messages.requests import Lane

GROW_AT = 0.5
"""Predicted delay, as a share of the lane's TTFT goal, at which engines are added: a new engine takes a while to load
the model, so it is started before the goal is missed."""
GROW_SECONDS = 3.0
"""Seconds for which the delay must stay that high, so that a burst which is over at once starts nothing."""
SHRINK_AT = 0.5
"""Share of the remaining engines' slots that may be in use for one engine to be removed."""
SHRINK_SECONDS = 120.0
"""Seconds for which the use must stay that low. Longer than an engine's start, or a quiet minute would cost more than
it saves."""
MOST_AT_ONCE = 2.0
"""Maximum factor by which one decision multiplies the engines, because a short burst can predict a delay far above what
lasts."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy one engine is."""

    wait_s: Mapping[Lane, float]
    """Predicted seconds until a request that arrives now begins to run, by lane."""
    requests: int
    """Running and waiting requests of both lanes."""
    slots: int
    """Maximum number of running requests."""


class Scaler:
    """The wanted number of engines of one base model, from the loads of those that serve."""

    def __init__(self, least: int, most: int, goals: Mapping[Lane, LaneGoals]) -> None:
        self.goals = goals
        """The lanes' goals. Can be set."""
        self._least = least
        self._most = most
        self._wanted = least
        self._short_since: float | None = None
        self._idle_since: float | None = None

    def wanted(self, loads: Sequence[EngineLoad], now: float, drained: int = 0) -> int:
        """Return how many engines there should be. Call this about once a second, with `now` in seconds. `drained`
        engines run and get no requests, because an operator drains them."""
        # While engines that were asked for do not serve yet, no more are asked for. One that finds no room is no longer
        # wanted once the others are idle.
        pressure = self.pressure(loads)
        is_short = pressure > GROW_AT and len(loads) + drained >= self._wanted
        self._short_since = self._since(self._short_since, is_short, now)
        self._idle_since = self._since(self._idle_since, self._can_shrink(loads, pressure), now)
        if self._short_since is not None and now - self._short_since >= GROW_SECONDS:
            factor = min(pressure / GROW_AT, MOST_AT_ONCE)
            self._want(ceil(self._wanted * factor))
        elif self._idle_since is not None and now - self._idle_since >= SHRINK_SECONDS:
            self._want(self._wanted - 1)
        return self._wanted

    def pressure(self, loads: Sequence[EngineLoad]) -> float:
        """Return the predicted delay of the lane that is nearest to its TTFT goal, as a share of the goal, in the mean
        over the engines: the router sends requests to those with the shortest delay."""
        if not loads:
            return 0.0
        means = {lane: sum(load.wait_s.get(lane, 0.0) for load in loads) / len(loads) for lane in self.goals}
        return max(means[lane] / goals.ttft_s for lane, goals in self.goals.items())

    def _can_shrink(self, loads: Sequence[EngineLoad], pressure: float) -> bool:
        """Return whether one engine less would still have slots to spare, and no lane is near its goal."""
        if not loads:
            return False
        remaining = min(len(loads), self._wanted - 1)  # engines that do not serve yet are given up first
        slots = sum(load.slots for load in loads) * remaining / len(loads)
        return pressure <= GROW_AT and sum(load.requests for load in loads) <= SHRINK_AT * slots

    def _want(self, count: int) -> None:
        self._wanted = min(max(count, self._least), self._most)
        self._short_since = self._idle_since = None

    @staticmethod
    def _since(began: float | None, holds: bool, now: float) -> float | None:
        """Return the time since which a condition has held without a break; None if it does not hold. `began` is the
        result of the previous call."""
        return (began if began is not None else now) if holds else None
