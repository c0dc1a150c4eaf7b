"""What the masks of a grammar take, and how long they may take within a step."""

from __future__ import annotations

STEP_SECONDS = 0.004
"""Seconds that the masks of a step may take together, divided evenly between its requests with grammars: four tenths of
a step of SmolLM2 on two cores. A grammar whose masks take more than its part is slow."""
ROW_SECONDS = 0.00025
"""Seconds that a mask may take in any case, so that full batches do not make usual grammars slow: their masks take 20
to 100 microseconds, and together less than the rest of such a step."""
FEW = 16
"""Number of masks of which the mean counts: the first masks of a usual grammar build what later ones use, and may take
a millisecond."""


class MaskCost:
    """Seconds that the masks of one grammar take: a mean over the last 32 to 64 of them. `tried` is the mean of the
    trial (`engine.grammar_check.trial`)."""

    def __init__(self, tried: float = 0.0) -> None:
        self._seconds, self._count = tried * FEW, FEW if tried else 0

    @property
    def mean(self) -> float:
        return self._seconds / max(FEW, self._count)

    def add(self, seconds: float, masks: int = 1) -> None:
        if self._count >= 4 * FEW:
            self._seconds, self._count = self._seconds / 2, self._count // 2
        self._seconds += seconds
        self._count += masks

    def exceeds(self, rows: int) -> bool:
        """Return whether the grammar is too slow for a step with `rows` requests that follow grammars."""
        return self.mean > step_share(rows)


def step_share(rows: int) -> float:
    """Return the seconds that each of `rows` masks of a step may take."""
    return max(ROW_SECONDS, STEP_SECONDS / rows)
