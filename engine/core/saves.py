"""The host pages a plan uses: what it copies out, what it copies back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

from engine.core.prefix import page_keys
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.types import HostPageId, Lane, PageCopy, PrefixKey


class Saves:
    """An overlay over the host tier, which it leaves as it is."""

    def __init__(self, state: EngineState) -> None:
        self._host = state.host
        self._size = state.config.block_size
        self._state = state
        self._rules = state.config.scheduling
        self._pinned: Counter[PrefixKey] = Counter()
        """Copied back by this plan, and by how many: not to be given up for others."""
        self._given_up: set[PrefixKey] = set()
        """Written over by `saved`, which come first: not to be copied back any more."""
        self._free: Iterator[HostPageId] = iter(state.host.free)
        self._oldest: Iterator[PrefixKey] = iter(state.host.page_of)
        self.saved: dict[PrefixKey, PageCopy] = {}
        self.checkpoints: dict[str, int] = {}

    def match(self, keys: list[PrefixKey]) -> list[HostPageId]:
        """Host pages of the leading keys, safe until `let_go`."""
        if not self._host.page_of:
            return []
        pages = self._host.match(takewhile(lambda key: key not in self._given_up, keys))
        self._pinned.update(keys[: len(pages)])
        return pages

    def let_go(self, keys: list[PrefixKey]) -> None:
        """They will not be copied back after all."""
        self._pinned.subtract(keys)

    def preempted(self, seq: Sequence) -> int:
        """A sequence gives up its pages: copies out the full ones it has, unless its like is checkpointed as it runs
        or not kept at all. Returns how many copies are made."""
        if not self._host.num_pages or (self._rules.preemption == "checkpoint" and seq.lane is not Lane.INTERACTIVE):
            return 0
        return self._save(seq, len(seq.pages))

    def checkpoint(self, gone: dict[str, Sequence]) -> int:
        """Copies out a few pages of running batch sequences that are full and not on the host yet."""
        if not self._host.num_pages or self._rules.preemption != "checkpoint":
            return 0
        made = 0
        for seq in self._state.running.values():
            if made >= self._rules.checkpoint_pages:
                break
            if seq.lane is not Lane.INTERACTIVE and seq.num_saved < seq.num_computed // self._size:
                made += self._save(seq, self._rules.checkpoint_pages - made) if seq.id not in gone else 0
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
        """A free host page, else that of the copy to give up first."""
        page = next(self._free, None)
        if page is not None:
            return page
        key = next((key for key in self._oldest if self._pinned[key] <= 0), None)
        if key is None:
            return None
        self._given_up.add(key)
        return self._host.page_of[key]
