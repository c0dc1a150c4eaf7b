"""The host tier: copies of KV pages in host memory, looked up by prefix key.

The keys are those of the prefix cache (adapter and all tokens up to the end of the page), so that any sequence with the
same prefix can use a copy, and a lost copy only costs a recomputation. Copies therefore have no owners, cannot be
pinned and cannot leak; they only have an eviction order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from engine.core.prefix import leading_pages
from engine.core.types import HostPageId, PrefixKey


class HostTier:
    """Map of prefix keys to host pages, in eviction order. Only `commit.py` changes it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.page_of: OrderedDict[PrefixKey, HostPageId] = OrderedDict()
        self.key_of: dict[HostPageId, PrefixKey] = {}
        self.free = dict.fromkeys(range(num_pages))
        """Free host pages (an ordered set)."""

    def match(self, keys: Iterable[PrefixKey]) -> list[HostPageId]:
        """Return the host pages of the longest run of leading keys that are in the tier."""
        return leading_pages(self.page_of, keys)

    def put(self, key: PrefixKey, page: HostPageId) -> None:
        """Store that a host page holds the copy of `key` from now on. Its previous copy, if any, is lost."""
        if page in self.key_of:
            del self.page_of[self.key_of[page]]
        else:
            del self.free[page]
        self.page_of[key], self.key_of[page] = page, key

    def touch(self, keys: Iterable[PrefixKey]) -> None:
        """Move the copies of keys that were used to the end of the eviction order."""
        for key in keys:
            if key in self.page_of:
                self.page_of.move_to_end(key)

    def demote(self, keys: Iterable[PrefixKey]) -> None:
        """Move the copies of a sequence that has ended to the front of the eviction order."""
        for key in keys:
            if key in self.page_of:
                self.page_of.move_to_end(key, last=False)
