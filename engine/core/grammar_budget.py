"""Which grammars a plan begins to have prepared."""

from __future__ import annotations

from engine.core.grammars import Grammar, Stage
from engine.core.state import EngineState
from engine.core.types import Lane


class GrammarBudget:
    """An overlay over the grammars, which it leaves as they are.

    Attributes:
        prepared: begun by this plan (an ordered set).
    """

    def __init__(self, state: EngineState) -> None:
        self._grammars = state.grammars
        self._most = state.config.max_preparations
        self._wanted = self._grammars.count(Stage.WANTED)
        self._under_way = self._grammars.count(Stage.UNDER_WAY)
        self.prepared: dict[Grammar, None] = {}

    def is_open(self, lane: Lane) -> bool:
        """Somebody waits for one, and one more may be under way for this lane."""
        most = self._most if lane is Lane.INTERACTIVE else max(1, self._most - 1)
        return self._under_way + len(self.prepared) < most and self._wanted > len(self.prepared)

    def prepare(self, grammar: Grammar | None, lane: Lane) -> None:
        """Begins with one that nobody has begun with, while this lane may."""
        if grammar is not None and self._grammars.stage(grammar) is Stage.WANTED and self.is_open(lane):
            self.prepared[grammar] = None
