"""The host tier: copies of KV pages in host memory, found by what they hold.

Keys are those of the prefix cache (adapter and all tokens up to the page's end), so a copy is good for whoever needs
the same prefix, and losing one costs a recomputation and nothing else. Hence no owners, no pins, and nothing to leak:
only an order in which copies are given up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from engine.core.prefix import leading_pages
from engine.core.types import HostPageId, PrefixKey


class HostTier:
    """Key -> host page, the one to give up first in front. `commit.py` is its only writer."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.page_of: OrderedDict[PrefixKey, HostPageId] = OrderedDict()
        self.key_of: dict[HostPageId, PrefixKey] = {}
        self.free = dict.fromkeys(range(num_pages))
        """An ordered set."""

    def match(self, keys: Iterable[PrefixKey]) -> list[HostPageId]:
        """Host pages of the leading keys that are here."""
        return leading_pages(self.page_of, keys)

    def put(self, key: PrefixKey, page: HostPageId) -> None:
        """`page` holds `key` from now on, and what it held is gone."""
        if page in self.key_of:
            del self.page_of[self.key_of[page]]
        else:
            del self.free[page]
        self.page_of[key], self.key_of[page] = page, key

    def touch(self, keys: Iterable[PrefixKey]) -> None:
        """They were useful: given up last."""
        for key in keys:
            if key in self.page_of:
                self.page_of.move_to_end(key)

    def demote(self, keys: Iterable[PrefixKey]) -> None:
        """Their sequence has ended: given up first."""
        for key in keys:
            if key in self.page_of:
                self.page_of.move_to_end(key, last=False)
