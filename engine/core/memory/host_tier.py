"""The host tier: copies of KV pages in host memory, by prefix key.

A copy is there for one of three reasons, which decide in what order host pages are reused:

    idle      a prefix that was evicted from the device, or whose sequence has ended: the oldest use first
    needed    pages of live sequences, saved for a preemption: only for other live sequences, when no idle copy is left
    leased    pages that are being sent to another engine: never before the transfer ends

Pages that are being received from another engine are reserved: they are neither free nor copies yet.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from engine.core.memory.prefix import leading_pages
from engine.core.messages.requests import HostPageId, PrefixKey


class HostTier:
    """Index of the host memory tier: maps prefix keys to the host pages that hold copies of their KV, and decides which
    copies are overwritten first. Only `commit/` changes it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.page_of: dict[PrefixKey, HostPageId] = {}
        self.key_of: dict[HostPageId, PrefixKey] = {}
        self.free = dict.fromkeys(range(num_pages))
        """Free host pages (an ordered set)."""
        self.idle: OrderedDict[PrefixKey, None] = OrderedDict()
        """Keys of the copies that are neither needed nor leased, in the order in which their pages are reused."""
        self.needed: OrderedDict[PrefixKey, int] = OrderedDict()
        """Number of live sequences that have saved the page of a key, whether its copy is still there or not. The
        keys of the copies that were restored last come last."""
        self.leased: Counter[PrefixKey] = Counter()
        """Number of transfers to other engines that may read the copy of a key."""
        self.reserved: set[HostPageId] = set()
        """Host pages that a transfer from another engine may write."""

    def match(self, keys: Iterable[PrefixKey]) -> list[HostPageId]:
        """Return the host pages of the longest run of leading keys that are in the host tier."""
        return leading_pages(self.page_of, keys)

    def reusable(self, *, needed: bool) -> Iterator[PrefixKey]:
        """Yield the prefix keys of the KV copies in host memory that may be overwritten, in the order of reuse: idle
        copies and, only with `needed`, those of live sequences after them."""
        yield from self.idle
        if needed:
            yield from (key for key in self.needed if key in self.page_of and key not in self.leased)

    def put(self, key: PrefixKey, page: HostPageId) -> None:
        """Record that a host page, which was free, reserved or held another copy, holds the copy of `key` from now
        on."""
        if page in self.key_of:
            self._forget(page)
        self.free.pop(page, None)
        self.reserved.discard(page)
        self.page_of[key], self.key_of[page] = page, key
        self._sort(key)

    def touch(self, keys: Iterable[PrefixKey]) -> None:
        """Mark the copies of those `keys` that are in the tier as most recently used, so that their pages are reused
        last."""
        for key in keys:
            for order in (self.idle, self.needed):
                if key in order:
                    order.move_to_end(key)

    def forget(self, keys: Iterable[PrefixKey]) -> None:
        """Free the host pages of the copies of these `keys` that no transfer to another engine reads."""
        for key in keys:
            page = self.page_of.get(key)
            if page is not None and key not in self.leased:
                self._forget(page)
                self.free[page] = None

    def need(self, keys: Iterable[PrefixKey]) -> None:
        """Record that one more live sequence has saved the KV pages of these keys to host memory, so that their copies
        are overwritten only if no idle copy is left."""
        for key in keys:
            self.needed[key] = self.needed.get(key, 0) + 1
            self._sort(key)

    def end_need(self, keys: Iterable[PrefixKey]) -> None:
        """Record that a sequence that has saved the pages of these keys has ended. Copies that no other sequence needs
        become idle and are overwritten first, because the device still has the same pages, and saves them when it
        evicts them."""
        for key in keys:
            self.needed[key] -= 1
            if not self.needed[key]:
                del self.needed[key]
                self._sort(key)
                if key in self.idle:
                    self.idle.move_to_end(key, last=False)

    def lease(self, key: PrefixKey) -> None:
        """Record that one more transfer to another engine reads the copy of a key, which must be in the host tier. A
        leased copy is not overwritten."""
        self.leased[key] += 1
        self._sort(key)

    def end_lease(self, keys: Iterable[PrefixKey]) -> None:
        for key in keys:
            self.leased[key] -= 1
            if not self.leased[key]:
                del self.leased[key]
                self._sort(key)

    def reserve(self, most: int) -> list[HostPageId]:
        """Take at most `most` host pages for KV that another engine sends, free ones and then those of idle copies, and
        return them. The caller has them written, and then calls `put` or `unreserve` for each."""
        pages = list(islice(self.free, most))
        for key in list(islice(self.idle, most - len(pages))):
            pages.append(self.page_of[key])
            self._forget(self.page_of[key])
        for page in pages:
            self.free.pop(page, None)
        self.reserved.update(pages)
        return pages

    def unreserve(self, pages: Iterable[HostPageId]) -> None:
        """Free host pages that `reserve` took and that no KV was written to."""
        for page in pages:
            self.reserved.remove(page)
            self.free[page] = None

    def _forget(self, page: HostPageId) -> None:
        key = self.key_of.pop(page)
        del self.page_of[key]
        self.idle.pop(key, None)

    def _sort(self, key: PrefixKey) -> None:
        """Update `idle`, the order in which host pages are reused, after a change to a key: append the key, as the one
        used last, if its copy is neither needed nor leased, otherwise remove it."""
        if key not in self.page_of or key in self.needed or key in self.leased:
            self.idle.pop(key, None)
        elif key not in self.idle:
            self.idle[key] = None
