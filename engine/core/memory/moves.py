"""The moves of KV pages between engines that are under way: imports and exports (see messages/moves.py)."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from engine.core.messages.moves import MoveOrder
from engine.core.messages.requests import HostPageId, PrefixKey

MOST_IMPORTS = 64
"""Maximum number of fetches under way, each of which takes the mover a thread."""


@dataclass(slots=True)
class KvImport:
    """State of a fetch of KV pages from another engine for a request."""

    request_id: str
    deadline: float
    num_come: int
    pages: dict[PrefixKey, HostPageId]
    """Reserved host pages, by key, for the pages that have not come yet, in the order in which they will come."""
    is_cancelled: bool = False


@dataclass(slots=True)
class KvExport:
    """State of an export: the KV pages that another engine wants, in order, and how many of them were sent so far."""

    keys: tuple[PrefixKey, ...]
    waits: bool
    """True means that missing pages are waited for, because a request is about to compute them."""
    num_leased: int = 0
    """Number of leading keys whose copies are leased, or were."""
    num_ready: int = 0
    """Number of leading keys whose copies are complete and have been reported to the mover as ready."""
    num_sent: int = 0
    """Number of leading keys that were sent, so that their leases have ended."""
    is_over: bool = False


@dataclass(slots=True)
class KvMoves:
    """All moves of KV pages under way: fetches from other engines (imports) and pages that other engines fetch
    (exports). Only `commit/moves.py` changes them."""

    is_on: bool = False
    """True once the engine has a mover. Without one, nothing is fetched."""
    imports: dict[int, KvImport] = field(default_factory=dict)
    exports: dict[int, KvExport] = field(default_factory=dict)
    awaited: dict[PrefixKey, int] = field(default_factory=dict)
    """Keys that requests wait for, with the import that fetches their pages."""
    outbox: deque[MoveOrder] = field(default_factory=deque)
    num_begun: int = 0
    """Number of imports so far, which are numbered from 1 on."""
    come: tuple[float, float] = (0.0, 0.0)
    """Number of pages that came and the seconds that they took, as decaying sums: each fetch halves the weight of
    earlier ones."""

    @property
    def pages_per_second(self) -> float:
        """Rate, in pages per second, at which fetched pages came recently, without the time in which the other engine
        computed them; 0 if none came."""
        pages, seconds = self.come
        return pages / seconds if seconds else 0.0

    def is_awaited(self, key: PrefixKey, now: float) -> bool:
        """Return whether the KV page of a key is being fetched from another engine and the fetch's deadline has not
        passed. Requests then wait for the page rather than compute it."""
        fetch = self.imports.get(self.awaited.get(key, 0))
        return fetch is not None and now < fetch.deadline

    def holds_up(self, request_id: str, now: float) -> bool:
        """Return whether a waiting request should not start yet: KV pages are being fetched for it from another engine,
        and the fetch's deadline has not passed."""
        for one in self.imports.values():
            if one.request_id == request_id and one.pages and not one.is_cancelled and now < one.deadline:
                return True
        return False

    def leases(self) -> Counter[PrefixKey]:
        """Return, for each prefix key, the number of exports to other engines that may read its host copy."""
        return Counter(key for one in self.exports.values() for key in one.keys[one.num_sent : one.num_leased])
