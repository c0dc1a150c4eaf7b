"""Remembered verdicts by content hash, so that the same grammar is compiled once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from engine.grammar_check.job import DEATHS, Key, Reason, Verdict

KEPT = 4096
"""Verdicts that are remembered; each takes less than a kilobyte."""
DEATH_SECONDS = 600.0
"""How long a verdict stands that followed from a worker's death. A machine out of memory can look like one."""


class Verdicts:
    """The verdicts used last. Not thread-safe. Verdicts that say nothing about the grammar are not kept."""

    def __init__(self, clock: Callable[[], float], kept: int = KEPT) -> None:
        self._clock = clock
        self._kept = kept
        self._known: OrderedDict[Key, tuple[Verdict, float]] = OrderedDict()
        """Each with the time at which it expires."""

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Key) -> Verdict | None:
        """None means that the grammar is unknown, or that its verdict has expired."""
        found = self._known.get(key)
        if found is None:
            return None
        if found[1] <= self._clock():
            del self._known[key]
            return None
        self._known.move_to_end(key)
        return found[0]

    def put(self, key: Key, verdict: Verdict) -> None:
        if verdict.reason in (Reason.UNDECIDED, Reason.QUEUE):
            return
        lasts = DEATH_SECONDS if verdict.reason in DEATHS else float("inf")
        self._known[key] = (verdict, self._clock() + lasts)
        self._known.move_to_end(key)
        if len(self._known) > self._kept:
            self._known.popitem(last=False)
