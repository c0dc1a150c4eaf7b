"""Grammars that answers must follow: which are needed, which are prepared (outside the core), and their memory.

    WANTED --planned--> UNDER_WAY --GrammarReady--> READY

A grammar is known while a live sequence needs it; the core does not interpret its text. A sequence whose grammar is not
ready stays in the queue, and sequences behind it may start. The memory of a prepared grammar is charged to the tenant
whose request had it prepared, until no live sequence needs it; `plan/ahead.py` divides memory between tenants by
weight.

A mask has the tokens that a request's grammar allows next. Usually the executor computes it within the step, in 20 to
100 microseconds. Where it would take longer, the request's sequence is left out of the steps until its mask is there:

    running --StepResult.masking--> waiting --GrammarWork.masks--> under way --MaskReady--> running

Only that sequence waits. Tenants take turns by the device time that they were charged, and masks are charged like
device time. While steps compute something, masks are computed during half of the time at most, because they take a core
that steps need on a CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from enum import Enum

from engine.core.fairness.shares import Shares
from engine.core.messages.grammar import Grammar
from engine.core.state.sequence import Sequence

LEAST_BYTES = 4 << 20
"""Bytes charged for a grammar until its size is known, and the minimum charge afterwards, so that a bound on the memory
also bounds the number of grammars. Typical grammars hold 1 MB when they are ready and grow slightly as answers follow
them; hostile ones hold up to 40 MB."""
SLICE_S = 0.01
"""Seconds of masks, as predicted, that a plan has the executor compute: about one step on a CPU. At least one mask is
computed, and the next ones are chosen when it is done, so that no tenant waits behind another's whole queue."""
SMOOTHING = 0.25
"""Weight of the newest mask in the predicted seconds of a sequence's first slow mask."""


class Stage(Enum):
    WANTED = "wanted"
    UNDER_WAY = "under way"
    READY = "ready"


@dataclass(slots=True)
class _GrammarEntry:
    live: int = 0
    """Number of sequences that need the grammar, waiting or running."""
    stage: Stage = Stage.WANTED
    tenant: str = ""
    weight: float = 1.0
    """Weight of the tenant that is charged for the memory, set when the preparation begins."""
    num_bytes: int = 0
    """Bytes charged to `tenant`."""


class SlowMasks:
    """The running sequences that wait for slow masks, and the masks under way. Only `commit` changes
    them."""

    def __init__(self) -> None:
        self.waiting: dict[str, Sequence] = {}
        """Running sequences whose next mask is neither computed nor under way, by request id."""
        self.under_way: dict[str, Sequence] = {}
        """Sequences whose mask the executor is computing, by request id, including those that have ended or were
        preempted since: the executor answers each of them."""
        self._seconds = SLICE_S
        """Predicted seconds of a sequence's first slow mask: a moving average."""
        self._rests_until = 0.0
        """Time on the engine's clock until which no mask is begun while steps compute something."""

    def blocks(self, seq: Sequence) -> bool:
        """Return whether a running sequence must be left out of a step: its mask is not there or, as the mask after a
        pending token cannot be there either, it has a pending token."""
        if not seq.masks_slowly:
            return False
        return seq.num_pending > 0 or seq.id in self.waiting or self.under_way.get(seq.id) is seq

    def choose(self, now: float, apart_from: Container[str], *, computes: bool) -> tuple[str, ...]:
        """Return the ids of the sequences whose masks a plan has the executor compute: the first ones by lane, device
        time of tenant and class, and due time, until they are predicted to take `SLICE_S` seconds. There are none while
        masks are under way or, if the plan `computes` chunks, while masks rest. Changes nothing."""
        if not self.waiting or self.under_way or (computes and now < self._rests_until):
            return ()
        chosen: list[str] = []
        seconds = 0.0
        for seq in sorted((seq for name, seq in self.waiting.items() if name not in apart_from), key=_turn):
            chosen.append(seq.id)
            seconds += seq.forecast.mask_seconds or self._seconds
            if seconds >= SLICE_S:
                break
        return tuple(chosen)

    def wait(self, seq: Sequence) -> None:
        """Let a running sequence wait for a mask, unless its mask is under way."""
        seq.masks_slowly = True
        if self.under_way.get(seq.id) is not seq:
            self.waiting[seq.id] = seq

    def leave(self, seq: Sequence) -> None:
        """Record that a sequence has stopped running. If its mask is under way, the executor still answers."""
        self.waiting.pop(seq.id, None)

    def begin(self, request_id: str) -> None:
        self.under_way[request_id] = self.waiting.pop(request_id)

    def end(self, request_id: str, seconds: float, now: float) -> Sequence | None:
        """Record that the executor has answered for a mask, which took `seconds` of a core's time, and return its
        sequence; None if no mask of this id is under way."""
        seq = self.under_way.pop(request_id, None)
        if seq is not None:
            seq.forecast.mask_seconds = seconds
            self._seconds += SMOOTHING * (seconds - self._seconds)
            self._rests_until = max(now, self._rests_until) + seconds
        return seq


def _turn(seq: Sequence) -> tuple[int, float, float, float, str]:
    account = seq.account
    return seq.request.lane, account.tenant.served, account.served, seq.due, seq.id


class Grammars:
    """All grammars that live requests need, with the stage of each one's preparation and the memory that tenants are
    charged for it. Only `commit/` changes them."""

    def __init__(self) -> None:
        self._known: dict[Grammar, _GrammarEntry] = {}
        self._stages: Counter[Stage] = Counter()
        """Number of known grammars in each stage."""
        self.memory = Shares()
        """Bytes that prepared grammars hold, by the tenant that is charged."""
        self.forgotten: list[Grammar] = []
        """Grammars that have lost their last sequence since the last plan: the executor may forget them."""
        self.masks = SlowMasks()
        """Masks that are computed beside the steps."""

    def __len__(self) -> int:
        return len(self._known)

    def count(self, stage: Stage) -> int:
        return self._stages[stage]

    def live(self) -> dict[Grammar, int]:
        """Return the number of sequences that need each grammar."""
        return {grammar: entry.live for grammar, entry in self._known.items()}

    def charges(self) -> dict[Grammar, int]:
        """Return the bytes charged for each grammar whose preparation was started."""
        return {grammar: entry.num_bytes for grammar, entry in self._known.items() if entry.stage is not Stage.WANTED}

    def stage(self, grammar: Grammar) -> Stage:
        return self._known[grammar].stage

    def blocks(self, grammar: Grammar | None) -> bool:
        """Return whether a sequence that needs this grammar has to wait for its preparation."""
        return grammar is not None and self._known[grammar].stage is not Stage.READY

    def use(self, grammar: Grammar | None) -> None:
        """Count a new sequence that needs a grammar, and register a new grammar as WANTED. None is ignored."""
        if grammar is None:
            return
        if grammar not in self._known:
            self._known[grammar] = _GrammarEntry()
            self._stages[Stage.WANTED] += 1
        self._known[grammar].live += 1

    def leave(self, grammar: Grammar | None) -> None:
        """Record that a sequence that needs a grammar has ended. If no other needs its grammar, it is forgotten and, if
        its preparation was started, no longer charged, and the next plan tells the executor. None is ignored."""
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
        """Record that the preparation of a WANTED grammar starts, and charge `LEAST_BYTES` to a tenant for it."""
        entry = self._known[grammar]
        self._move(entry, Stage.UNDER_WAY)
        entry.tenant, entry.weight = tenant, weight
        self._charge(entry, LEAST_BYTES)

    def take_answer(self, grammar: Grammar, num_bytes: int = 0) -> bool:
        """Record that the preparation of a grammar has ended, successfully or not: its stage becomes READY, and its
        tenant is charged as much more as `num_bytes`, the memory that the grammar holds, exceeds `LEAST_BYTES`. Returns
        False, and does nothing, if no preparation was under way or no sequence needs the grammar any more."""
        entry = self._known.get(grammar)
        if entry is None or entry.stage is not Stage.UNDER_WAY:
            return False
        self._move(entry, Stage.READY)
        self._charge(entry, max(0, num_bytes - LEAST_BYTES))
        return True

    def _move(self, entry: _GrammarEntry, stage: Stage) -> None:
        self._stages[entry.stage] -= 1
        entry.stage = stage
        self._stages[stage] += 1

    def _charge(self, entry: _GrammarEntry, num_bytes: int) -> None:
        entry.num_bytes += num_bytes
        self.memory.add(entry.tenant, entry.weight, num_bytes)
