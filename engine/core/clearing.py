"""Making room in a plan: idle adapters go first, then whom the policy names."""

from __future__ import annotations

from collections import Counter

from engine.core.adapter_budget import AdapterBudget
from engine.core.page_budget import PageBudget
from engine.core.policy import Policy
from engine.core.room import Room
from engine.core.saves import Saves
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.step_budget import StepBudget
from engine.core.types import AdapterId, Cause, Lane, PageId, ScheduledChunk

MOST_DISPLACED = 8
"""Once so many sequences yield in a plan, none is displaced for another tenant of its lane any more: each search for
one looks at all running sequences, which takes half a millisecond with 256 of them."""


class Clearing:
    """Attributes:
    preempted: sequences that yield, in the order they do.
    causes: what each of them makes room for.
    num_admitted: sequences the plan starts.
    reserved: kept for adapters that have been waited for too long.
    """

    def __init__(
        self,
        state: EngineState,
        policy: Policy,
        budget: StepBudget,
        pages: PageBudget,
        adapters: AdapterBudget,
        host: Saves,
        chunks: dict[str, ScheduledChunk],
    ) -> None:
        self._state = state
        self._config = state.config
        self._policy = policy
        self._budget = budget
        self._pages = pages
        self._adapters = adapters
        self._host = host
        self._chunks = chunks
        self.preempted: dict[str, Sequence] = {}
        self.causes: list[Cause] = []
        self.num_admitted = 0
        self.reserved = Room(0)

    def make(self, need: Room, seq: Sequence, cause: Cause = Cause.PAGES) -> bool:
        """Makes room available to a sequence; `cause` is what those yield for who do not yield their slot.

        False, with nothing done, if even that would not be enough.
        """
        need = self._with_spare(need, seq)
        if self._room(seq).covers(need):
            return True
        victims = self._victims(need, seq)
        if victims is None:
            return False
        slots = max(0, need.slots - self.slots_left)
        for number, victim in enumerate(victims):
            self.preempt(victim, cause if number >= slots else Cause.SLOT)
        for adapter in self._adapters.idle():
            if self._room(seq).covers(need):
                break
            self._adapters.evict(adapter)
        return True

    def can_make(self, need: Room, seq: Sequence) -> bool:
        need = self._with_spare(need, seq)
        return self._room(seq).covers(need) or self._victims(need, seq) is not None

    def preempt(self, victim: Sequence, cause: Cause) -> None:
        self.preempted[victim.id] = victim
        self.causes.append(cause)
        self._pages.give_back(reversed(self._held(victim)))
        chunk = self._chunks.pop(victim.id, None)
        if chunk:
            self._budget.take_back(victim, chunk.start, chunk.num_tokens)
        self._budget.move_pages(self._host.preempted(victim))
        if victim.request.adapter:
            self._adapters.stop(victim.request.adapter)

    @property
    def slots_left(self) -> int:
        return self._config.max_seqs - (len(self._state.running) - len(self.preempted) + self.num_admitted)

    def takes_as(self, seq: Sequence) -> Lane:
        """The lane whose idle pages it may have: a batch sequence too large for what is never held takes any."""
        room = self._config.usable_pages - self._state.adapter_pages - self._state.most_held
        return seq.lane if self._config.pages_for(seq.num_tokens) <= room // 2 else Lane.INTERACTIVE

    def _room(self, seq: Sequence) -> Room:
        return self._adapters.room(self._pages.available(self.takes_as(seq)), self.slots_left)

    def _with_spare(self, need: Room, seq: Sequence) -> Room:
        """A sequence about to start leaves pages to adapters waited for, and to others to grow into."""
        if seq.pages:
            return need
        spare = seq.lane is not Lane.INTERACTIVE and (self._state.running or self.num_admitted)
        watermark = int(self._config.scheduling.watermark * self._config.num_pages) if spare else 0
        kept = self.reserved if need.rows else Room(self.reserved.pages)
        return need.plus(kept).plus(Room(watermark))

    def _victims(self, need: Room, seq: Sequence) -> list[Sequence] | None:
        """The fewest of the policy's victims, in its order, that yield enough; None if all of them do not."""
        victims: list[Sequence] = []
        room = self._room(seq).plus(self._adapters.idle_room)
        if room.covers(need):
            return victims
        pages, adapters = Counter[PageId](), Counter[AdapterId]()
        for victim in self._policy.victims(self._state, seq):
            if victim is seq:
                return None
            if victim.id in self.preempted:
                continue
            if victim.lane is seq.lane and not seq.pages and len(self.preempted) + len(victims) >= MOST_DISPLACED:
                return None
            victims.append(victim)
            freed = self._adapters.freed_by(victim, adapters)
            room = room.plus(freed).plus(Room(self._pages.gain(self._held(victim), pages), 1))
            if room.covers(need):
                return victims
        return None

    def _held(self, victim: Sequence) -> list[PageId]:
        chunk = self._chunks.get(victim.id)
        return victim.pages + list(chunk.new_pages) if chunk else victim.pages
