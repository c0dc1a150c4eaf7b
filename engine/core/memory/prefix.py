"""The prefix cache: full KV pages that are found again by a key of their content.

A key is a cryptographic digest, chained to the key of the previous page as in vLLM's automatic prefix caching, so that
equal keys mean equal KV. The first link includes the adapter's content hash, because the same text under another
adapter is another prefix, and the realm: the tenant, unless the configuration lets tenants share prefixes, and the
request's salt. A cache hit shows in `cached_tokens` and in the TTFT, and would otherwise tell one tenant, or one user
of a tenant that gives each a salt, what another has asked.

The pages before the invocation of an activated LoRA have the keys of the base model, which computes them, so that
several such adapters share the pages of one conversation.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from engine.core.messages.requests import AdapterHash, Lane, PageId, PrefixKey, Request

KEY_BYTES = 16


def realm_of(request: Request, *, share_prefixes: bool = False) -> str:
    """Return the realm of a request: requests of the same realm may share cached prefixes. It consists of the tenant,
    unless tenants share prefixes, and the salt. No two pairs give the same realm, because no tenant's name has a NUL.
    """
    tenant = "" if share_prefixes else request.tenant
    return f"{tenant}\0{request.cache_salt}" if request.cache_salt else tenant


def root_key(adapter_hash: AdapterHash | None, realm: str) -> PrefixKey:
    parts = (adapter_hash or "", realm)
    text = "".join(f"{len(part)}:{part}" for part in parts)  # so that no two pairs read the same
    return blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def activated_key(parent: PrefixKey, adapter_hash: AdapterHash, offset: int) -> PrefixKey:
    """Return the parent key for the page in which an activated LoRA begins, at the page's token `offset`. `parent` is
    the key of the page before, which the base model computes. The offset is part of the key, because in another prompt,
    in which the adapter begins later, the base model may compute the same tokens."""
    text = parent + offset.to_bytes(4, "little") + adapter_hash.encode()
    return blake2b(text, digest_size=KEY_BYTES, person=b"activated").digest()


def next_key(parent: PrefixKey, tokens: list[int]) -> PrefixKey:
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=KEY_BYTES).digest()


def leading_pages(page_of: Mapping[PrefixKey, int], keys: Iterable[PrefixKey]) -> list[int]:
    """Return the pages, of the device or of the host, of the longest run of leading `keys` that `page_of` contains."""
    pages = []
    for key in keys:
        page = page_of.get(key)
        if page is None:
            break
        pages.append(page)
    return pages


class PrefixCache:
    """Map between prefix keys and the device pages that hold their KV, and the cached pages without references (`idle`,
    by lane, the oldest first). Only `commit/` changes it. A page belongs to the highest lane that used it
    (interactive is highest). Idle pages of a lane may only be taken for that lane and higher ones, until `decay` moves
    them to the batch lane."""

    def __init__(self) -> None:
        self.page_of: dict[PrefixKey, PageId] = {}
        self.key_of: dict[PageId, PrefixKey] = {}
        self.lane_of: dict[PageId, Lane] = {}
        self.idle: dict[Lane, OrderedDict[PageId, float]] = {lane: OrderedDict() for lane in Lane}
        """Idle pages by lane, with the time when each was parked, in seconds on the engine's clock."""
        self.promised: dict[PrefixKey, str] = {}
        """Keys of prompt pages that are being computed, with the id of the request that computes them. Other requests
        with the same prefix may wait for these pages."""
        self.tails: dict[PrefixKey, str] = {}
        """Keys of the ends of prompts (see `tail_key`), with the id of a running request in whose page their KV is. The
        `n` answers of a prompt copy that page from the first of them. Sharing it until one of them writes would save
        nothing, because each writes to it in its first step."""

    @property
    def num_idle(self) -> int:
        return sum(map(len, self.idle.values()))

    def is_idle(self, page: PageId) -> bool:
        return any(page in pages for pages in self.idle.values())

    def match(self, keys: list[PrefixKey]) -> list[PageId]:
        """Return the device pages of the longest run of leading `keys` that are cached. Nothing is changed."""
        return leading_pages(self.page_of, keys)

    def register(self, key: PrefixKey, page: PageId, lane: Lane) -> None:
        """Add a full page to the prefix cache and end the promise of a request to compute it. If the key or the page is
        cached already, that entry remains."""
        self.promised.pop(key, None)
        if key not in self.page_of and page not in self.key_of:
            self.page_of[key] = page
            self.key_of[page] = key
            self.lane_of[page] = lane

    def promise(self, keys: list[PrefixKey], request_id: str) -> None:
        """Record that a request is about to compute the pages of those keys that are neither cached nor promised, so
        that other requests with this prefix can wait for the pages."""
        for key in keys:
            if key not in self.page_of:
                self.promised.setdefault(key, request_id)

    def break_promises(self, keys: list[PrefixKey], request_id: str) -> None:
        """Remove the promises of a request to compute the pages of these keys, because it stops running; other
        requests' promises remain."""
        for key in keys:
            if self.promised.get(key) == request_id:
                del self.promised[key]

    def park(self, pages: list[PageId], now: float) -> list[PageId]:
        """Mark those of the unreferenced `pages` that are in the prefix cache as idle since `now`: they stay cached
        until they are evicted. Return the others, which can be freed. The last pages are parked first, so that they are
        evicted before the prefixes that they extend."""
        others = []
        for page in reversed(pages):
            if page in self.key_of:
                self.idle[self.lane_of[page]][page] = now
            else:
                others.append(page)
        return others

    def unpark(self, pages: list[PageId], lane: Lane) -> None:
        """Record that a sequence of `lane` references these pages. Cached ones are no longer idle, and belong to `lane`
        from now on if it is higher than their lane. Other pages are ignored."""
        for page in pages:
            if page in self.lane_of:
                self.idle[self.lane_of[page]].pop(page, None)
                self.lane_of[page] = min(self.lane_of[page], lane)

    def decay(self, parked_before: float, most: int) -> None:
        """Move idle interactive pages to the batch lane, the oldest first, so that batch work may take them.

        Args:
            parked_before: pages that were parked before this time (seconds on the engine's clock) are moved.
            most: maximum number of idle pages that remain in the interactive lane.
        """
        held, lowest = self.idle[Lane.INTERACTIVE], self.idle[Lane.BATCH]
        while held:
            page, parked = next(iter(held.items()))
            if parked >= parked_before and len(held) <= most:
                break
            del held[page]
            self.lane_of[page] = Lane.BATCH
            lowest[page] = parked

    def drop(self, page: PageId) -> None:
        """Remove a cached page from the cache, idle or not. The caller frees the page."""
        self.idle[self.lane_of.pop(page)].pop(page, None)
        del self.page_of[self.key_of.pop(page)]
