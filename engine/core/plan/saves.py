"""The host pages that one plan uses for KV: pages that it saves to the host, and pages that it restores from the
host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile

from engine.core.messages.requests import HostPageId, Lane, PageId, PrefixKey
from engine.core.messages.step import PageCopy
from engine.core.state.engine_state import EngineState
from engine.core.state.page_keys import page_keys
from engine.core.state.sequence import Sequence


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
        self._reusable: dict[bool, Iterator[PrefixKey]] = {
            needed: state.host.reusable(needed=needed) for needed in (False, True)
        }
        """Keys of host copies that this plan may overwrite, in order. Under True, copies that live sequences need come
        last; under False, they are left out."""
        self.saved: dict[PrefixKey, PageCopy] = {}
        self.checkpoints: dict[str, int] = {}
        self.exports: dict[int, int] = {}

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
            if seq.num_saved >= seq.num_computed // self._size or seq.lane is Lane.INTERACTIVE:
                continue
            if seq.shares_pages and seq.id not in gone:
                made += self._save(seq, self._most - made)
        return made

    def export(self, most: int, room: int) -> int:
        """Plan to save to the host the pages that other engines have asked for (exports) and that only the device has,
        at most `most`, and return the number of copies. At most `room` more host pages are leased to exports, and no
        host page is taken from a live sequence."""
        made = 0
        for number, export in self._state.moves.exports.items():
            done = export.num_leased
            while done < len(export.keys) and room and not export.is_over:
                key = export.keys[done]
                if not self._is_known(key):
                    page = self._state.prefix.page_of.get(key)
                    if page is None or made >= most or not self._copy(key, page, needed=False):
                        break
                    made += 1
                self._pinned[key] += 1
                done, room = done + 1, room - 1
            if done > export.num_leased:
                self.exports[number] = done
        return made

    def evicted(self, pages: Iterable[PageId], most: int) -> int:
        """Plan to save cached pages that this plan evicts from the device, in order and at most `most`, and return the
        number of copies. They take no host page from a live sequence, and later requests with these prefixes restore
        them."""
        made = 0
        for page in pages:
            if made >= most:
                break
            key = self._state.prefix.key_of[page]
            made += not self._is_known(key) and self._copy(key, page, needed=False)
        return made

    def _save(self, seq: Sequence, most: int) -> int:
        full = seq.num_computed // self._size
        keys, done = page_keys(seq, full, self._size), seq.num_saved
        made = 0
        while done < full and made < most:
            if not self._is_known(keys[done]):
                if not self._copy(keys[done], seq.pages[done], needed=True):
                    break
                made += 1
            done += 1
        if done > seq.num_saved:
            self.checkpoints[seq.id] = done
        return made

    def _is_known(self, key: PrefixKey) -> bool:
        return key in self.saved or (key in self._host.page_of and key not in self._given_up)

    def _copy(self, key: PrefixKey, page: PageId, *, needed: bool) -> bool:
        """Plan to save the device page `page`, whose prefix key is `key`, on a free host page or, if there is none, on
        that of the first copy that may be overwritten. With `needed`, copies that live sequences need may be
        overwritten, too, but last. Returns False if no host page can be used."""
        host_page = next(self._free, None)
        if host_page is None:
            unpinned = (key for key in self._reusable[needed] if self._pinned[key] <= 0 and key not in self._given_up)
            old = next(unpinned, None)
            if old is None:
                return False
            self._given_up.add(old)
            host_page = self._host.page_of[old]
        self.saved[key] = PageCopy(page, host_page)
        return True
