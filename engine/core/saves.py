"""The host pages that one plan uses for KV: pages that it saves to the host, and pages that it restores from the
host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

from engine.core.prefix import page_keys
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.types import HostPageId, Lane, PageCopy, PrefixKey


class Saves:
    """Chooses the host pages of one plan's saves and restores of KV, as an overlay: the host tier is not changed."""

    def __init__(self, state: EngineState) -> None:
        self._host = state.host
        self._size = state.config.block_size
        self._state = state
        self._rules = state.config.scheduling
        self._most = self._rules.checkpoint_pages or -(-state.config.max_seqs // state.config.block_size)
        self._pinned: Counter[PrefixKey] = Counter()
        """Keys that this plan restores, each with the number of sequences that restore it. Their host pages are not
        overwritten."""
        self._given_up: set[PrefixKey] = set()
        """Keys whose host pages `saved` overwrites. Saves come before restores, so these keys can no longer be
        restored."""
        self._free: Iterator[HostPageId] = iter(state.host.free)
        self._oldest: Iterator[PrefixKey] = iter(state.host.page_of)
        self.saved: dict[PrefixKey, PageCopy] = {}
        self.checkpoints: dict[str, int] = {}

    def match(self, keys: list[PrefixKey]) -> list[HostPageId]:
        """Return the host pages of the leading keys that can be restored, and pin them against reuse until `let_go`."""
        if not self._host.page_of:
            return []
        pages = self._host.match(takewhile(lambda key: key not in self._given_up, keys))
        self._pinned.update(keys[: len(pages)])
        return pages

    def let_go(self, keys: list[PrefixKey]) -> None:
        """Unpin keys that `match` has pinned and that are not restored after all: their pages may be overwritten."""
        self._pinned.subtract(keys)

    def preempted(self, seq: Sequence) -> int:
        """Plan to save the full pages of a preempted sequence that were not copied to the host before, and return the
        number of copies. Nothing is copied if there are no host pages or the sequence shares none, or if it is a batch
        one and preemption is `checkpoint`: its pages are then copied while it runs."""
        if not (self._host.num_pages and seq.shares_pages):
            return 0
        if self._rules.preemption == "checkpoint" and seq.lane is not Lane.INTERACTIVE:
            return 0
        return self._save(seq, len(seq.pages))

    def checkpoint(self, gone: dict[str, Sequence]) -> int:
        """Plan to save full pages of running batch sequences that were not copied to the host before, at most
        `checkpoint_pages` in all (0: as many as decodes fill), and return the number of copies: 0 unless preemption is
        `checkpoint`. The sequences in `gone` (by request id), which this plan preempts, are skipped."""
        if not self._host.num_pages or self._rules.preemption != "checkpoint":
            return 0
        made = 0
        for seq in self._state.running.values():
            if made >= self._most:
                break
            if seq.lane is Lane.INTERACTIVE or not seq.shares_pages:
                continue
            if seq.num_saved < seq.num_computed // self._size:
                made += self._save(seq, self._most - made) if seq.id not in gone else 0
        return made

    def _save(self, seq: Sequence, most: int) -> int:
        full = seq.num_computed // self._size
        keys, done = page_keys(seq, full, self._size), seq.num_saved
        made = 0
        while done < full and made < most:
            if not self._is_known(keys[done]):
                page = self._take()
                if page is None:
                    break
                self.saved[keys[done]] = PageCopy(seq.pages[done], page)
                made += 1
            done += 1
        if done > seq.num_saved:
            self.checkpoints[seq.id] = done
        return made

    def _is_known(self, key: PrefixKey) -> bool:
        return key in self.saved or (key in self._host.page_of and key not in self._given_up)

    def _take(self) -> HostPageId | None:
        """Return a free host page or, if there is none, that of the first copy in eviction order that is not pinned.
        None means that all are pinned."""
        page = next(self._free, None)
        if page is not None:
            return page
        key = next((key for key in self._oldest if self._pinned[key] <= 0), None)
        if key is None:
            return None
        self._given_up.add(key)
        return self._host.page_of[key]
