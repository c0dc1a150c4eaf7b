"""The prefix cache: pages whose content is known by what was computed into them.

A key digests the adapter's content hash and every token up to the end of its page, each key chained to the one before
(as in vLLM's automatic prefix caching), so equal keys mean equal KV. The adapter is part of the first link: the same
text under another adapter, or under another version of the same one, is another prefix. So is the realm, which is a
request's tenant unless the configuration lets tenants share: what is found in the cache shows in `cached_tokens` and in
the time to the first token, and would tell one tenant what another has asked. The digest is cryptographic because a
collision would show one tenant's context to another.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from engine.core.sequence import Sequence
from engine.core.types import AdapterId, Lane, PageId, PrefixKey

KEY_BYTES = 16


def root_key(adapter: AdapterId | None, realm: str) -> PrefixKey:
    parts = (adapter or "", realm)
    text = "".join(f"{len(part)}:{part}" for part in parts)  # so that no two pairs read the same
    return blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def next_key(parent: PrefixKey, tokens: list[int]) -> PrefixKey:
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=KEY_BYTES).digest()


def page_keys(seq: Sequence, num_full_pages: int, block_size: int) -> list[PrefixKey]:
    """Keys of the first `num_full_pages` pages of a sequence, remembered on it."""
    keys = seq.page_keys
    while len(keys) < num_full_pages:
        start = len(keys) * block_size
        parent = keys[-1] if keys else root_key(seq.request.adapter, seq.realm)
        keys.append(next_key(parent, seq.tokens[start : start + block_size]))
    return keys[:num_full_pages]


def leading_pages(page_of: Mapping[PrefixKey, int], keys: Iterable[PrefixKey]) -> list[int]:
    """Pages of the leading keys that are there, be they the device's or the host's."""
    pages = []
    for key in keys:
        page = page_of.get(key)
        if page is None:
            break
        pages.append(page)
    return pages


class PrefixCache:
    """Key -> page, and which of those pages nobody references (`idle`, by lane, the oldest first).

    A page belongs to the highest lane that ever used it. Idle pages of a lane are only taken for that lane and those
    above it, until they have been idle long enough to `decay` to the lowest.
    """

    def __init__(self) -> None:
        self.page_of: dict[PrefixKey, PageId] = {}
        self.key_of: dict[PageId, PrefixKey] = {}
        self.lane_of: dict[PageId, Lane] = {}
        self.idle: dict[Lane, OrderedDict[PageId, float]] = {lane: OrderedDict() for lane in Lane}
        """Lane -> page -> when it was parked, in seconds on the engine's clock."""
        self.promised: dict[PrefixKey, str] = {}
        """Prompt pages being computed, and by which request: whoever needs the same may wait for them."""

    @property
    def num_idle(self) -> int:
        return sum(map(len, self.idle.values()))

    def is_idle(self, page: PageId) -> bool:
        return any(page in pages for pages in self.idle.values())

    def match(self, keys: list[PrefixKey]) -> list[PageId]:
        """Pages of the longest cached run of leading keys."""
        return leading_pages(self.page_of, keys)

    def register(self, key: PrefixKey, page: PageId, lane: Lane) -> None:
        """Makes a full page findable. The first page registered under a key stays the one that is found."""
        self.promised.pop(key, None)
        if key not in self.page_of and page not in self.key_of:
            self.page_of[key] = page
            self.key_of[page] = key
            self.lane_of[page] = lane

    def promise(self, keys: list[PrefixKey], request_id: str) -> None:
        """A request is about to compute the pages of these keys."""
        for key in keys:
            if key not in self.page_of:
                self.promised.setdefault(key, request_id)

    def break_promises(self, keys: list[PrefixKey], request_id: str) -> None:
        """It stopped running, whatever it has computed by now."""
        for key in keys:
            if self.promised.get(key) == request_id:
                del self.promised[key]

    def park(self, pages: list[PageId], now: float) -> list[PageId]:
        """Keeps the unreferenced pages that hold a prefix; returns the others. Tails are parked first, so that they
        are taken back before the prefixes they extend."""
        others = []
        for page in reversed(pages):
            if page in self.key_of:
                self.idle[self.lane_of[page]][page] = now
            else:
                others.append(page)
        return others

    def unpark(self, pages: list[PageId], lane: Lane) -> None:
        """The pages are referenced again, by a sequence of `lane`."""
        for page in pages:
            if page in self.lane_of:
                self.idle[self.lane_of[page]].pop(page, None)
                self.lane_of[page] = min(self.lane_of[page], lane)

    def decay(self, parked_before: float, most: int) -> None:
        """Interactive pages idle for too long, or beyond `most` of them, are worth no more than batch ones."""
        held, lowest = self.idle[Lane.INTERACTIVE], self.idle[Lane.BATCH]
        while held:
            page, parked = next(iter(held.items()))
            if parked >= parked_before and len(held) <= most:
                break
            del held[page]
            self.lane_of[page] = Lane.BATCH
            lowest[page] = parked

    def drop(self, page: PageId) -> None:
        """Forgets what a page holds."""
        self.idle[self.lane_of.pop(page)].pop(page, None)
        del self.page_of[self.key_of.pop(page)]
