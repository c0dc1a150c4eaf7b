"""Adapters: where each one is, who uses it, and what it is worth to keep.

Two facts, independent of each other, say where it is:

    host memory   ABSENT --planned--> FETCHING --AdapterFetched--> PRESENT --dropped--> ABSENT
    device        no pages --planned, from host memory--> pages --evicted--> no pages

Its pages come from the same pool as KV. They stay its own while a running sequence uses it, while an operator pins it,
and until somebody needs the room. A load is usable in the step that plans it, so there is no state in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf, log2

from engine.core.types import AdapterId, PageId

COPY_BYTES_PER_S = 10e9
DISK_BYTES_PER_S = 500e6
"""What copies and reads are taken to reach until one of this adapter has been timed: a memory's and an SSD's order of
magnitude."""


class HostCopy(Enum):
    """An adapter in host memory."""

    ABSENT = "absent"
    FETCHING = "fetching"
    CANCELLED = "cancelled"
    """Being fetched for nobody: its bytes are free again once the fetch has been answered."""
    PRESENT = "present"


@dataclass(slots=True, eq=False)
class Adapter:
    """One adapter known to the core. Mutated by `commit.py` and `commit_adapters.py` alone."""

    id: AdapterId
    num_pages: int
    rank: int = 0
    num_bytes: int = 0
    path: str = ""
    host: HostCopy = HostCopy.ABSENT
    pages: tuple[PageId, ...] = ()
    """On the device; none where it is not there."""
    live: int = 0
    """Sequences of this adapter, waiting or running."""
    running: int = 0
    last_used: float | None = None
    """Seconds on the engine's clock."""
    num_starts: int = 0
    """Sequences that began to run with it since it became resident."""
    popularity: float = -inf
    """log2 of the sequences that ever started with it, each counting twice as much as one a half-life earlier."""
    pinned: bool = False
    closing: bool = False
    """Dropped: refuses new requests, and is forgotten when the last one ends."""
    hits: int = 0
    """Sequences that started with it and did not have to wait for a copy."""
    loads: int = 0
    fetches: int = 0
    load_seconds: float = 0.0
    """Of the last copy to the device."""
    fetch_seconds: float = 0.0
    """Of the last read from disk."""
    fetched_at: float = -inf
    """When that ended, on the engine's clock."""
    failures: int = 0
    """Fetches that failed, since the last one that did not."""
    failure: str = ""
    """Why the last of them did."""
    retry_at: float = 0.0
    """Before this time, on the engine's clock, nobody tries again."""

    @property
    def is_resident(self) -> bool:
        return bool(self.pages)

    @property
    def host_bytes(self) -> int:
        """Host memory it takes, or has reserved."""
        return 0 if self.host is HostCopy.ABSENT else self.num_bytes

    @property
    def is_missing(self) -> bool:
        """Somebody waits for it, and it is neither on the device nor on its way."""
        return bool(self.live) and not self.pages and self.host is HostCopy.ABSENT

    def start(self, now: float, half_life: float) -> None:
        """A sequence starts with it. Counting by weights that grow with time, instead of letting what was counted
        decay, orders adapters alike and leaves all others as they are (forward decay: Cormode et al., ICDE 2009)."""
        low, high = sorted((self.popularity, now / half_life))
        self.popularity = high + log2(1 + 2 ** (low - high))
        self.num_starts += 1

    @property
    def worth_on_device(self) -> float:
        """log2 of popularity x reload cost / pages: what a page of it saves. The lowest makes room first."""
        cost = self.load_seconds or self.num_bytes / COPY_BYTES_PER_S
        if self.host is not HostCopy.PRESENT:
            cost += self._fetch_cost
        return self.popularity + log2(max(cost, 1e-9) / self.num_pages)

    @property
    def worth_in_host(self) -> float:
        """The same for a byte of host memory."""
        return self.popularity + log2(max(self._fetch_cost, 1e-9) / max(self.num_bytes, 1))

    @property
    def _fetch_cost(self) -> float:
        return self.fetch_seconds or self.num_bytes / DISK_BYTES_PER_S
