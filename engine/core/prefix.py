"""The prefix cache: pages whose content is known by what was computed into them.

A key digests the adapter's content hash and every token up to the end of its page, each key chained to the one before
(as in vLLM's automatic prefix caching), so equal keys mean equal KV. The adapter is part of the first link: the same
text under another adapter, or under another version of the same one, is another prefix. The digest is cryptographic
because a collision would show one tenant's context to another.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b

from engine.core.types import AdapterId, PageId, PrefixKey, Sequence

KEY_BYTES = 16


def root_key(adapter: AdapterId | None) -> PrefixKey:
    return blake2b((adapter or "").encode(), digest_size=KEY_BYTES).digest()


def next_key(parent: PrefixKey, tokens: list[int]) -> PrefixKey:
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=KEY_BYTES).digest()


def page_keys(seq: Sequence, num_full_pages: int, block_size: int) -> list[PrefixKey]:
    """Keys of the first `num_full_pages` pages of a sequence, remembered on it."""
    keys = seq.page_keys
    while len(keys) < num_full_pages:
        start = len(keys) * block_size
        parent = keys[-1] if keys else root_key(seq.request.adapter)
        keys.append(next_key(parent, seq.tokens[start : start + block_size]))
    return keys[:num_full_pages]


class PrefixCache:
    """Key -> page, and which of those pages nobody references (`idle`, oldest first)."""

    def __init__(self) -> None:
        self.page_of: dict[PrefixKey, PageId] = {}
        self.key_of: dict[PageId, PrefixKey] = {}
        self.idle: OrderedDict[PageId, None] = OrderedDict()

    def match(self, keys: list[PrefixKey]) -> list[PageId]:
        """Pages of the longest cached run of leading keys."""
        pages = []
        for key in keys:
            page = self.page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, key: PrefixKey, page: PageId) -> None:
        """Makes a full page findable. The first page registered under a key stays the one that is found."""
        if key not in self.page_of and page not in self.key_of:
            self.page_of[key] = page
            self.key_of[page] = key

    def park(self, pages: list[PageId]) -> list[PageId]:
        """Keeps the unreferenced pages that hold a prefix; returns the others. Tails are parked first, so that they
        are taken back before the prefixes they extend."""
        others = []
        for page in reversed(pages):
            if page in self.key_of:
                self.idle[page] = None
            else:
                others.append(page)
        return others

    def unpark(self, pages: list[PageId]) -> None:
        """The pages are referenced again."""
        for page in pages:
            self.idle.pop(page, None)

    def drop(self, page: PageId) -> None:
        """Forgets what a page holds."""
        self.idle.pop(page, None)
        del self.page_of[self.key_of.pop(page)]
