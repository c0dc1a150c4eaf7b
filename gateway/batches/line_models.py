"""Which base model or virtual model serves each line of a shard. It decides which gate the line waits at."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import accumulate

from gateway.batches.lease import Lease


class LineModels:
    """The models of a shard's lines, as found when the batch's input was validated, and how many lines of each have not
    ended."""

    def __init__(self, models: Collection[str], lease: Lease) -> None:
        """`models` are the names of this gateway's base models, then those of its virtual models. A line that needs
        another model, or whose batch has no record of models, is counted under the first of them: it may still run
        there, or it fails."""
        first = next(iter(models))
        record = lease.batch.lines.model_lines
        self._ends = list(accumulate(lines for _, lines in record))
        self._names = [*(name if name in models else first for name, _ in record), first]
        self._left = Counter(map(self.of, lease.open_positions()))
        self._inside: Counter[str] = Counter()

    def of(self, position: int) -> str:
        """Return the name of the base model or virtual model of a line."""
        return self._names[bisect_right(self._ends, position)]

    @property
    def needed(self) -> Collection[str]:
        """The models of the shard's lines that have not ended, for which the shard needs gates."""
        return [model for model, lines in self._left.items() if lines]

    @property
    def waiting(self) -> Mapping[str, int]:
        """Numbers of lines that have not ended and are not in the engine, by model."""
        return {model: lines - self._inside[model] for model, lines in self._left.items()}

    def enter(self, position: int) -> None:
        """Note that a line is in the engine, until `leave` is called."""
        self._inside[self.of(position)] += 1

    def leave(self, position: int) -> None:
        self._inside[self.of(position)] -= 1

    def end(self, position: int) -> None:
        """Note that a line has ended."""
        self._left[self.of(position)] -= 1
