"""Grammars that answers must follow: which are needed, which have been prepared outside the core, and what they hold.

    WANTED --planned--> UNDER_WAY --GrammarReady--> READY

A grammar is known while a live sequence needs it; the core does not know what its text means. A sequence whose grammar
is not ready stays in the queue, and those behind it go on.

A prepared grammar holds memory, which is charged to the tenant whose request had it prepared until no live sequence
needs it. `grammar_budget` shares that memory out by tenants' weights.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from engine.core.shares import Shares

LEAST_BYTES = 4 << 20
"""Charged for a grammar until its size is known, and at least. Typical ones hold 1 MB when they are ready and grow by
some as answers follow them, hostile ones up to 40 MB; a bound on the memory thus bounds the number of grammars."""


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
    tenant: str = ""
    weight: float = 1.0
    """The weight of the tenant that is charged for the memory, set when the preparation begins."""
    num_bytes: int = 0
    """What that tenant is charged."""


class Grammars:
    """The books. `commit.py` and `apply.py` are the only writers."""

    def __init__(self) -> None:
        self._known: dict[Grammar, _Entry] = {}
        self._stages: Counter[Stage] = Counter()
        """How many of the known grammars are in each stage."""
        self.memory = Shares()
        """Bytes that prepared grammars hold, by the tenant that is charged."""
        self.forgotten: list[Grammar] = []
        """No sequence has needed these since the last plan: the executor may forget them."""

    def __len__(self) -> int:
        return len(self._known)

    def count(self, stage: Stage) -> int:
        return self._stages[stage]

    def live(self) -> dict[Grammar, int]:
        """Return the number of sequences that need each grammar."""
        return {grammar: entry.live for grammar, entry in self._known.items()}

    def charges(self) -> dict[Grammar, int]:
        """Return the bytes that are charged for each grammar that has been begun with."""
        return {grammar: entry.num_bytes for grammar, entry in self._known.items() if entry.stage is not Stage.WANTED}

    def stage(self, grammar: Grammar) -> Stage:
        return self._known[grammar].stage

    def blocks(self, grammar: Grammar | None) -> bool:
        """Return whether a sequence that needs this grammar has to wait for its preparation."""
        return grammar is not None and self._known[grammar].stage is not Stage.READY

    def use(self, grammar: Grammar | None) -> None:
        """Count a sequence that needs a grammar. None means that it needs none."""
        if grammar is None:
            return
        if grammar not in self._known:
            self._known[grammar] = _Entry()
            self._stages[Stage.WANTED] += 1
        self._known[grammar].live += 1

    def leave(self, grammar: Grammar | None) -> None:
        """Count a sequence that has ended."""
        if grammar is None:
            return
        entry = self._known[grammar]
        entry.live -= 1
        if not entry.live:
            del self._known[grammar]
            self._stages[entry.stage] -= 1
            if entry.stage is not Stage.WANTED:
                self.memory.remove(entry.tenant, entry.num_bytes)
                self.forgotten.append(grammar)

    def begin(self, grammar: Grammar, tenant: str, weight: float) -> None:
        """Have a tenant charged for a grammar that is being prepared from now on."""
        entry = self._known[grammar]
        self._move(entry, Stage.UNDER_WAY)
        entry.tenant, entry.weight = tenant, weight
        self._charge(entry, LEAST_BYTES)

    def take_answer(self, grammar: Grammar, num_bytes: int = 0) -> bool:
        """The grammar is ready and holds so many bytes, or will never be ready. Returns False if no sequence waits for
        it any more."""
        entry = self._known.get(grammar)
        if entry is None or entry.stage is not Stage.UNDER_WAY:
            return False
        self._move(entry, Stage.READY)
        self._charge(entry, max(0, num_bytes - LEAST_BYTES))
        return True

    def _move(self, entry: _Entry, stage: Stage) -> None:
        self._stages[entry.stage] -= 1
        entry.stage = stage
        self._stages[stage] += 1

    def _charge(self, entry: _Entry, num_bytes: int) -> None:
        entry.num_bytes += num_bytes
        self.memory.add(entry.tenant, entry.weight, num_bytes)
