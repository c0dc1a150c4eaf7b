"""The page pool: allocation of device memory pages to KV and adapters. A page is either free, referenced by one or more
owners (sequences that share a prefix, or one adapter), or *idle*: not referenced, but still holding a cached prefix
that may be matched again or evicted. The pool counts references and does not know tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from engine.core.messages.requests import PageId

NULL_PAGE: PageId = 0
"""The null page, always zero and never allocated: block tables are padded with it, and missing adapter rows point to
it."""


class PagePool:
    """Reference counts of all device pages, and the free list. Only `commit/` changes it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self.free: OrderedDict[PageId, None] = OrderedDict.fromkeys(range(1, num_pages))
        """Free pages (an ordered set, for O(1) removal of any page). The page freed last is reused first, so that a
        small load in a large pool does not keep touching new memory, which costs page faults."""

    def acquire(self, pages: Iterable[PageId]) -> None:
        """Add a reference to each page, and remove the pages from the free list."""
        for page in pages:
            self.free.pop(page, None)
            self.refs[page] += 1

    def release(self, pages: Iterable[PageId]) -> list[PageId]:
        """Remove a reference from each page. Returns pages left without references, which `reclaim` can free."""
        unreferenced = []
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                unreferenced.append(page)
        return unreferenced

    def reclaim(self, pages: Iterable[PageId]) -> None:
        """Put unreferenced pages on the free list, to be reused first."""
        for page in pages:
            self.free[page] = None
            self.free.move_to_end(page, last=False)
