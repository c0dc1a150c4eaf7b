"""Grammars that answers must follow: which are needed, and which have been prepared by somebody outside the core.

    WANTED --planned--> UNDER_WAY --GrammarReady--> READY

One is known while a live sequence needs it; what its text means nobody here needs to know. Who waits for one that is
not ready stays in the queue, and those behind him go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GrammarKind(Enum):
    """What a grammar's text is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CONTEXT_FREE = "context_free"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Equal texts of one kind are one grammar."""

    kind: GrammarKind
    text: str


class Stage(Enum):
    WANTED = "wanted"
    UNDER_WAY = "under way"
    READY = "ready"


@dataclass(slots=True)
class _Entry:
    live: int = 0
    """Sequences that need it, waiting or running."""
    stage: Stage = Stage.WANTED


class Grammars:
    """The books. `commit.py` is its only writer."""

    def __init__(self) -> None:
        self._known: dict[Grammar, _Entry] = {}
        self.forgotten: list[Grammar] = []
        """Needed by nobody since the last plan: whoever prepared them may forget them."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, grammar: Grammar) -> bool:
        return grammar in self._known

    def count(self, stage: Stage) -> int:
        return sum(entry.stage is stage for entry in self._known.values())

    def live(self) -> dict[Grammar, int]:
        """Sequences that need each."""
        return {grammar: entry.live for grammar, entry in self._known.items()}

    def stage(self, grammar: Grammar) -> Stage:
        return self._known[grammar].stage

    def blocks(self, grammar: Grammar | None) -> bool:
        """Whoever needs it cannot start yet."""
        return grammar is not None and self._known[grammar].stage is not Stage.READY

    def use(self, grammar: Grammar | None) -> None:
        if grammar is not None:
            self._known.setdefault(grammar, _Entry()).live += 1

    def leave(self, grammar: Grammar | None) -> None:
        if grammar is None:
            return
        entry = self._known[grammar]
        entry.live -= 1
        if not entry.live:
            del self._known[grammar]
            if entry.stage is not Stage.WANTED:
                self.forgotten.append(grammar)

    def begin(self, grammar: Grammar) -> None:
        self._known[grammar].stage = Stage.UNDER_WAY

    def take_answer(self, grammar: Grammar) -> bool:
        """It is ready, or will never be. False: nobody waits for it any more."""
        entry = self._known.get(grammar)
        if entry is None or entry.stage is not Stage.UNDER_WAY:
            return False
        entry.stage = Stage.READY
        return True
