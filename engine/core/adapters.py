"""Adapter residency: where each adapter is, who uses it, and which may make room.

    (disk) --AddAdapter--> HOST --planned--> LOADING --StepResult.loaded--> RESIDENT --evicted--> HOST

An adapter's pages come from the same pool as KV. It is pinned while a running sequence uses it; a resident adapter
nobody runs stays in its pages until somebody needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from engine.core.types import AdapterId, PageId


class Residency(Enum):
    HOST = "host"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(slots=True, eq=False)
class Adapter:
    """One adapter known to the core. Mutated by `commit.py` alone."""

    id: AdapterId
    num_pages: int
    rank: int = 0
    residency: Residency = Residency.HOST
    pages: tuple[PageId, ...] = ()
    live: int = 0
    """Sequences of this adapter, waiting or running."""
    running: int = 0
    """Those running: the pins."""
    last_used: float = 0.0
    """Seconds on the engine's clock."""
    num_starts: int = 0
    """Sequences that began to run with it since it became resident."""
    closing: bool = False
    """Dropped: refuses new requests, and is forgotten when the last one ends."""


def eviction_order(adapters: Mapping[AdapterId, Adapter], pins: Mapping[AdapterId, int]) -> list[Adapter]:
    """Resident adapters without a pin, the one to give up its pages first: dropped ones, then least recently used."""
    idle = [a for a in adapters.values() if a.residency is Residency.RESIDENT and not pins.get(a.id)]
    return sorted(idle, key=lambda adapter: (not adapter.closing, adapter.last_used, adapter.id))
