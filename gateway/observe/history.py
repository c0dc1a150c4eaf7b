"""The last hours' figures for the console's charts, kept in two ring buffers in this gateway process.

A sampler adds one point every `FINE_SECONDS`. The fine ring holds the points of the last half hour, the coarse ring the
means of `COARSE_POINTS` consecutive points for a day. Both are bounded, to 1,800 points together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from gateway.api_schema.traffic import HistoryPoints

FINE_SECONDS = 5.0
FINE_KEPT = 360
"""Capacity of the fine ring in points: half an hour."""
COARSE_POINTS = 12
"""Number of fine points in one coarse point: a minute."""
COARSE_KEPT = 1440
"""Capacity of the coarse ring in points: a day."""
LATE_POINTS = 2.5
"""Age, in fine points, beyond which the newest point is too old to be reported as current."""

Figures = Mapping[str, float | None]
"""Values by name of the figure. None means that the figure was unknown at that moment."""


class History:
    """The last day's figures as points in time, in bounded memory (see the module)."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns Unix seconds."""
        self._clock = clock
        self._fine: deque[tuple[float, Figures]] = deque(maxlen=FINE_KEPT)
        self._coarse: deque[tuple[float, Figures]] = deque(maxlen=COARSE_KEPT)
        self._pending: list[Figures] = []

    def add(self, figures: Figures) -> None:
        """Append one point at the current time and, if it is the last of `COARSE_POINTS`, their means to the coarse
        ring."""
        now = self._clock()
        self._fine.append((now, figures))
        self._pending.append(figures)
        if len(self._pending) == COARSE_POINTS:
            self._coarse.append((now, _means(self._pending)))
            self._pending = []

    def latest(self, name: str) -> float | None:
        """Return the newest value of a figure; None where it is unknown, or the newest point is older than
        `LATE_POINTS` times `FINE_SECONDS`."""
        if not self._fine or self._clock() - self._fine[-1][0] > LATE_POINTS * FINE_SECONDS:
            return None
        return _rounded(self._fine[-1][1].get(name))

    def read(self, minutes: int) -> HistoryPoints:
        """Return the points of the last `minutes`: fine ones up to 30 minutes, otherwise coarse ones."""
        fine = minutes * 60 <= FINE_KEPT * FINE_SECONDS
        step = FINE_SECONDS if fine else FINE_SECONDS * COARSE_POINTS
        since = self._clock() - minutes * 60
        points = [point for point in (self._fine if fine else self._minutes()) if point[0] >= since]
        return HistoryPoints(step, [when for when, _ in points], _columns([figures for _, figures in points]))

    def _minutes(self) -> list[tuple[float, Figures]]:
        """Return (time, figures) of the coarse points; the last one is the mean of the minute that is not over yet."""
        begun = [(self._fine[-1][0], _means(self._pending))] if self._pending else []
        return [*self._coarse, *begun]


def _columns(points: Sequence[Figures]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for point in points for name in point)
    return {name: [_rounded(point.get(name)) for point in points] for name in names}


def _means(points: Sequence[Figures]) -> dict[str, float | None]:
    """Return the mean of each figure over the points at which it was known; None if it never was."""
    names = dict.fromkeys(name for point in points for name in point)
    return {name: _mean([value for point in points if (value := point.get(name)) is not None]) for name in names}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
