"""Starts the waiting sequences of a plan, with the loads of their adapters."""

from __future__ import annotations

from engine.core.memory.adapters import Adapter
from engine.core.messages.requests import AdapterHash, Cause, HostPageId, Lane, PageId
from engine.core.messages.step import Admission, PageCopy, PageFork, ScheduledChunk
from engine.core.plan.adapter_budget import Room
from engine.core.plan.clearing import Clearing, Overlays
from engine.core.plan.known_kv import Known, KnownKv, Transaction
from engine.core.state.engine_state import EngineState
from engine.core.state.sequence import Sequence

MOST_PASSED_OVER = 256
"""Maximum number of waiting sequences of a lane that one plan passes over because of adapters, grammars or fetches of
KV. Looking at each costs microseconds, and a queue may hold a hundred thousand."""


class Starts:
    """Starts waiting sequences in one plan, and records what the plan takes for them in its overlays. The caller calls
    `enter` for each lane, and then `start` for its sequences.

    Attributes:
        admitted: the sequences that start, by request id.
        forks: the pages that they copy from running sequences.
        restores: the pages that they copy from the host.
    """

    def __init__(
        self, state: EngineState, now: float, overlays: Overlays, clearing: Clearing, *, gathers: bool
    ) -> None:
        """See `Policy` for `gathers`."""
        self._state = state
        self._now = now
        self._gathers = gathers
        self._overlays = overlays
        self._clearing = clearing
        self._known = KnownKv(state, now, overlays.pages, overlays.host, clearing.preempted)
        self._lane = Lane.INTERACTIVE
        self._draining: set[AdapterHash] = set()
        """Resident adapters that no more sequences start with, so that they become idle and make room for an adapter
        that a request has waited for too long."""
        self._no_room = False
        """True means that an interactive sequence found no room, so that no further sequence starts in this plan."""
        self._too_many = dict.fromkeys(Lane, 1 << 30)
        """Size in pages of the last adapter that found no room, by lane. An adapter of at least that size finds none
        either."""
        self._passed_over = 0
        """Number of this lane's waiting sequences that were passed over because of adapters, grammars or fetches."""
        self.admitted: dict[str, Admission] = {}
        self.forks: list[PageFork] = []
        self.restores: list[PageCopy] = []

    def enter(self, lane: Lane) -> None:
        """Begin to start sequences of a lane."""
        self._lane = lane
        self._passed_over = 0

    @property
    def takes_new(self) -> bool:
        """Return whether this plan can still start any waiting sequence of the current lane: the lane's budget is open
        or the policy gathers batches, a slot is free (for the batch lane only), and no interactive sequence has failed
        to find room in this plan. The caller checks this before it looks at each sequence."""
        is_full = self._lane is not Lane.INTERACTIVE and self._clearing.slots_left <= 0
        return not (self._no_room or is_full) and (self._overlays.budget.is_open or self._gathers)

    def start(self, seq: Sequence) -> bool:
        """Start a waiting sequence, with a load of its adapter if needed, or pass it over: if its grammar is not ready,
        its pages are being fetched, another sequence is computing its next prefix page, or its adapter is neither
        resident nor in host memory, was evicted by this plan, finds no room or time for the copy, or takes no more
        sequences, to make way for another. Returns whether sequences after it may still start; False means that the
        lane starts no more in this plan."""
        if seq.id in self.admitted:
            return True
        if not self.takes_new:
            return False
        if self._state.grammars.blocks(seq.request.params.grammar):
            return self._pass_over()
        if self._state.moves.imports and self._state.moves.holds_up(seq.id, self._now):
            return self._pass_over()
        adapter = self._state.adapters[seq.request.adapter_hash] if seq.request.adapter_hash else None
        if adapter is None:
            return self._admit(seq)
        if adapter.adapter_hash not in self._draining and self._overlays.adapters.is_here(adapter):
            self._overlays.adapters.wanted.add(adapter.adapter_hash)
            return self._admit(seq)
        if (
            adapter.adapter_hash in self._draining
            or not self._overlays.fetches.is_held(adapter)
            or adapter.adapter_hash in self._overlays.adapters.evicted
        ):
            return self._pass_over()
        return self._start_with(adapter, seq)

    def is_old(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence arrived at least `adapter_age_s` ago, so that room is made for its adapter
        even at the expense of adapters of other sequences."""
        return self._now - seq.request.arrival >= self._state.config.scheduling.adapter_age_s

    def _pass_over(self) -> bool:
        """Count a waiting sequence that this plan does not start although later ones of its lane may start. Returns
        False once `MOST_PASSED_OVER` were counted: the plan then starts no more sequences of the lane."""
        self._passed_over += 1
        return self._passed_over < MOST_PASSED_OVER

    def _start_with(self, adapter: Adapter, seq: Sequence) -> bool:
        """Try to start a sequence together with the copy of its adapter from host memory, and otherwise pass it over.
        Returns whether sequences after it may still start."""
        if adapter.num_pages >= self._too_many[seq.lane]:
            return self._pass_over()
        if not self._overlays.budget.fits_pages(adapter.num_pages, is_old=self.is_old(seq)):
            return self._pass_over()
        if self._clearing.can_make(_room_of(adapter), seq):
            return self._admit(seq, adapter)
        self._too_many[seq.lane] = adapter.num_pages
        self._make_way(adapter, seq)
        return self._pass_over()

    def _admit(self, seq: Sequence, load: Adapter | None = None) -> bool:
        """Start a sequence if the budget grants it tokens (or the policy gathers batches), its pages find room and the
        step has time for the copies of KV and adapter. It takes the pages of all its known tokens at once, so that
        sequences in the middle of their prompts never compete for pages. `load` is the adapter to copy to the device;
        None means that no copy is needed.

        Returns:
            Whether sequences after it may still start. This is also True if the sequence is skipped because its next
                prefix page is being computed by another one, or fetched.
        """
        with Transaction() as taking:
            known = self._known.find(seq, taking)
            if known.is_promised or not self._overlays.budget.fits_pages(len(known.on_host)):
                return known.is_promised
            count = self._take_tokens(seq, known, load, taking)
            has_room = bool(count or self._gathers) and self._take_room(seq, known, load)
            if has_room:
                taking.keep()
        if has_room:
            self._begin(seq, known, count, load)
            return True
        self._no_room = self._no_room or bool(count and seq.lane is Lane.INTERACTIVE)
        if load and not count:
            self._load_alone(load, seq)
        return False

    def _take_tokens(self, seq: Sequence, known: Known, load: Adapter | None, taking: Transaction) -> int:
        """Take a sequence's cached pages, the time for the copy of its adapter, and its first tokens. Returns the
        number of these."""
        self._overlays.pages.share(known.cached)
        taking.took(self._overlays.pages.unshare, known.cached)
        if load:
            self._overlays.budget.move_pages(load.num_pages)
            taking.took(self._overlays.budget.move_pages, -load.num_pages)
        count = self._overlays.budget.grant(seq, known.num_tokens, len(seq.tokens) - known.num_tokens)
        taking.took(self._overlays.budget.take_back, seq, known.num_tokens, count)
        return count

    def _take_room(self, seq: Sequence, known: Known, load: Adapter | None) -> bool:
        """Make room for a sequence and its adapter. Returns whether there is room; otherwise nothing has changed."""
        need = Room(self._num_missing(seq, known), slots=1)
        if load is None:
            return self._clearing.make(need, seq, Cause.PAGES)
        return self._clearing.make(need.plus(_room_of(load)), seq, Cause.ADAPTER)

    def _begin(self, seq: Sequence, known: Known, count: int, load: Adapter | None) -> None:
        """Start a sequence, for which room was made, with its first `count` tokens."""
        if load:
            self._load(load, seq)
        new = self._overlays.pages.take(self._num_missing(seq, known), self._clearing.takes_as(seq))
        self._restore(new, known.on_host)
        if known.tail is not None:
            self.forks.append(PageFork(known.tail, new[len(known.on_host)]))
        self._note_admitted(seq, known.num_tokens, (*known.cached, *new))
        self._known.promise(known.keys_to_compute)
        if count:
            is_last = known.num_tokens + count == len(seq.tokens)
            self._overlays.chunks[seq.id] = ScheduledChunk(seq.id, known.num_tokens, count, (), is_last)

    def _num_missing(self, seq: Sequence, known: Known) -> int:
        return self._state.config.pages_for(len(seq.tokens)) - len(known.cached)

    def _note_admitted(self, seq: Sequence, num_computed: int, pages: tuple[PageId, ...]) -> None:
        self.admitted[seq.id] = _admission(seq, num_computed, pages)
        self._clearing.num_admitted += 1
        if seq.request.adapter_hash:
            self._overlays.adapters.start(seq.request.adapter_hash)

    def _load_alone(self, adapter: Adapter, seq: Sequence) -> None:
        """Load the adapter of a batch sequence, if room can be made, without starting the sequence, which then starts
        in the next step: a step that batch work shares often has time for the copy and for nothing else."""
        if seq.lane is not Lane.INTERACTIVE and self._clearing.make(_room_of(adapter), seq, Cause.ADAPTER):
            self._overlays.budget.move_pages(adapter.num_pages)
            self._load(adapter, seq)

    def _load(self, adapter: Adapter, seq: Sequence) -> None:
        self._overlays.adapters.load(adapter, seq.id, self._clearing.takes_as(seq))
        self._overlays.adapters.wanted.add(adapter.adapter_hash)
        self._overlays.fetches.kept.add(adapter.adapter_hash)

    def _restore(self, pages: tuple[PageId, ...], host_pages: list[HostPageId]) -> None:
        self.restores += map(PageCopy, pages, host_pages)
        self._overlays.budget.move_pages(len(host_pages))

    def _make_way(self, adapter: Adapter, seq: Sequence) -> None:
        """Handle an adapter that found no room. If its sequence arrived `adapter_age_s` ago or earlier, choose the
        adapter with the most starts among those in use that are not pinned and that no sequence of a more urgent lane
        runs with: no more sequences start with it, and room is reserved for the adapter that waits."""
        if not self.is_old(seq):
            return
        candidates = [a for a in self._overlays.adapters.in_use(seq.lane, self._state.running) if not a.pinned]
        if candidates:
            self._clearing.reserved = self._clearing.reserved.plus(_room_of(adapter))
            # By order of magnitude: while one adapter drains, another gets more starts, and switching to that one would
            # empty neither.
            most = max(candidates, key=lambda one: (one.loaded.num_starts.bit_length(), one.adapter_hash))
            self._draining.add(most.adapter_hash)


def _room_of(adapter: Adapter) -> Room:
    """Return the device pages and the slot of the adapter table that an adapter takes when it is loaded."""
    return Room(adapter.num_pages, 0, adapter.num_pages, 1)


def _admission(seq: Sequence, num_computed: int, pages: tuple[PageId, ...]) -> Admission:
    request = seq.request
    return Admission(
        request_id=seq.id,
        tokens=tuple(seq.tokens),
        num_prompt=len(request.prompt_ids),
        num_computed=num_computed,
        pages=pages,
        adapter_hash=request.adapter_hash,
        params=request.params,
        pooling=request.pooling,
        adapter_begin=seq.prefix.adapter_begin,
        num_scored=seq.num_scored,
    )
