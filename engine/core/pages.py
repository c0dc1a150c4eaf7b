"""The page pool: who may write where in device memory, for KV and adapters alike.

A page is either free, referenced by one or more owners (sequences sharing a prefix, or one adapter), or *idle*: not
referenced, but still holding a cached prefix that may be matched again or taken back. The pool counts references and
knows no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from engine.core.types import PageId

NULL_PAGE: PageId = 0
"""Always zero and never handed out: block tables are padded with it, and adapter rows that do not exist point at it."""


class PagePool:
    """Reference counts and the free list. `commit.py` is its only writer."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self.free: OrderedDict[PageId, None] = OrderedDict.fromkeys(range(1, num_pages))
        """An ordered set: O(1) removal of any page, and the page freed last is reused first. Memory that was never
        touched costs page faults, and a small load in a large pool would go on touching more of it."""

    def acquire(self, pages: Iterable[PageId]) -> None:
        """Adds a reference to each page, taking it off the free list if it was there."""
        for page in pages:
            self.free.pop(page, None)
            self.refs[page] += 1

    def release(self, pages: Iterable[PageId]) -> list[PageId]:
        """Drops a reference to each page; returns those nobody references any more, which are not free yet."""
        unreferenced = []
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                unreferenced.append(page)
        return unreferenced

    def reclaim(self, pages: Iterable[PageId]) -> None:
        """Puts unreferenced pages on the free list."""
        for page in pages:
            self.free[page] = None
            self.free.move_to_end(page, last=False)
