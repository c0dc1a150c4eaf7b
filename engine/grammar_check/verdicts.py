"""A cache of verdicts by content hash, so that the same grammar is compiled only once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from engine.grammar_check.job import DEATHS, Key, Reason, Verdict

KEPT = 4096
"""Maximum number of remembered verdicts; each takes less than a kilobyte."""
DEATH_SECONDS = 600.0
"""Seconds for which a verdict whose reason is in `DEATHS` is remembered. The worker's death may have had another cause
than the grammar, such as a machine that was out of memory."""


class Verdicts:
    """LRU cache of at most `kept` verdicts by grammar hash, without those that say nothing about the grammar
    (UNDECIDED, QUEUE). Those in `DEATHS` expire after `DEATH_SECONDS`. `clock` returns seconds. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], kept: int = KEPT) -> None:
        self._clock = clock
        self._kept = kept
        self._known: OrderedDict[Key, tuple[Verdict, float]] = OrderedDict()
        """Key -> (verdict, time on the clock at which it expires), the least recently used first."""

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Key) -> Verdict | None:
        """Return the remembered verdict on a grammar, now the most recently used. None: there is none or it expired."""
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
