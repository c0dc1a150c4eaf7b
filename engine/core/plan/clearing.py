"""Makes room in a plan by evicting idle adapters and by preempting the victims that the policy selects."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from engine.core.messages.requests import AdapterHash, Cause, Lane, PageId
from engine.core.messages.step import ScheduledChunk
from engine.core.plan.adapter_budget import AdapterBudget, Room
from engine.core.plan.ahead import FetchBudget, GrammarBudget
from engine.core.plan.page_budget import PageBudget, Saves
from engine.core.plan.step_budget import StepBudget
from engine.core.policy.policies import Policy
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence

MOST_DISPLACED = 8
"""Number of preemptions in a plan from which on no more sequences are preempted for a waiting one of another tenant of
the same lane. Each search for such a victim looks at all running sequences, which takes half a millisecond with 256 of
them."""


class Overlays(NamedTuple):
    """What one plan has taken and freed so far, as overlays over the engine state, which a plan does not change."""

    budget: StepBudget
    pages: PageBudget
    host: Saves
    adapters: AdapterBudget
    fetches: FetchBudget
    grammars: GrammarBudget
    chunks: dict[str, ScheduledChunk]
    """The chunks of the plan, by request id."""

    @classmethod
    def of(cls, state: EngineState, now: float, *, timed: bool) -> Overlays:
        """Return the overlays of an empty plan. See `StepBudget` for `timed`."""
        pages = PageBudget(state)
        return cls(
            StepBudget(state, now, timed),
            pages,
            Saves(state),
            AdapterBudget(state, pages),
            FetchBudget(state),
            GrammarBudget(state),
            {},
        )


class Clearing:
    """Makes room for the sequences of one plan by preempting sequences and evicting adapters. It records these in the
    plan's budgets and changes no engine state.

    Attributes:
        preempted: sequences that the plan preempts, in order, by request id.
        causes: the cause of each preemption.
        num_admitted: number of sequences that the plan starts.
        reserved: room that starting sequences must leave free for adapters that requests have waited for too long.
    """

    def __init__(self, state: EngineState, policy: Policy, overlays: Overlays) -> None:
        self._state = state
        self._config = state.config
        self._policy = policy
        self._budget = overlays.budget
        self._pages = overlays.pages
        self._adapters = overlays.adapters
        self._host = overlays.host
        self._chunks = overlays.chunks
        self.preempted: dict[str, Sequence] = {}
        self.causes: list[Cause] = []
        self.num_admitted = 0
        self.reserved = Room(0)

    def make(self, need: Room, seq: Sequence, cause: Cause = Cause.PAGES) -> bool:
        """Make room in the plan for a sequence, by preemptions and evictions of adapters. Returns True if there is
        enough room now.

        As few of the policy's victims are preempted, in its order, as suffice if all idle adapters were evicted as
        well. Then idle adapters are evicted until there is enough room. Returns False, and changes nothing, if the
        victims that may be preempted for this sequence do not suffice. The search for victims ends at the sequence
        itself and, for a starting sequence's own lane, at `MOST_DISPLACED` preemptions in this plan.

        Args:
            need: the room to make, in addition to what a starting sequence must leave free.
            seq: the sequence that needs it, running or about to start.
            cause: cause of the preemptions beyond those that free missing slots, which have the cause SLOT.
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
        self._pages.end_draft(victim)
        chunk = self._chunks.pop(victim.id, None)
        if chunk:
            self._budget.take_back(victim, chunk.start, chunk.num_tokens)
        self._budget.move_pages(self._host.preempted(victim))
        if victim.request.adapter_hash:
            self._adapters.stop(victim.request.adapter_hash)

    @property
    def slots_left(self) -> int:
        return self._config.max_seqs - (len(self._state.running) - len(self.preempted) + self.num_admitted)

    def takes_as(self, seq: Sequence) -> Lane:
        """Return the lane for which a sequence takes pages, which decides which idle prefix pages it may evict: usually
        its own. A batch sequence counts as interactive if it needs more than half of the pages that neither hold
        adapters nor may be held for interactive prefixes, because it might never start otherwise."""
        room = self._config.usable_pages - self._state.adapter_pages - self._state.most_held
        return seq.lane if self._config.pages_for(seq.num_tokens) <= room // 2 else Lane.INTERACTIVE

    def _room(self, seq: Sequence) -> Room:
        return self._adapters.room(self._pages.available(self.takes_as(seq)), self.slots_left)

    def _with_spare(self, need: Room, seq: Sequence) -> Room:
        """Return the room that must be available before a sequence takes `need`. A sequence that is about to start must
        also leave free the room `reserved` for adapters and, in the batch lane, if others run or start, the watermark,
        so that they can grow."""
        if seq.pages:
            return need
        spare = seq.lane is not Lane.INTERACTIVE and (self._state.running or self.num_admitted)
        watermark = int(self._config.scheduling.watermark * self._config.num_pages) if spare else 0
        kept = self.reserved if need.adapter_slots else Room(self.reserved.pages)
        return need.plus(kept).plus(Room(watermark))

    def _victims(self, need: Room, seq: Sequence) -> list[Sequence] | None:
        """Return the shortest prefix of the policy's victims for `seq` that frees enough room if all idle adapters are
        evicted as well. None means that even all permitted victims would not free enough."""
        victims: list[Sequence] = []
        room = self._room(seq).plus(self._adapters.idle_room)
        if room.covers(need):
            return victims
        pages, adapters = Counter[PageId](), Counter[AdapterHash]()
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
