"""Adapters: where each one is, and how many sequences use it. Two states are independent:

    host memory   ABSENT --planned--> FETCHING --AdapterFetched--> PRESENT --dropped--> ABSENT
    device        no pages --planned, from host memory--> pages --evicted--> no pages

The pages of an adapter come from the same pool as KV pages. The adapter keeps them while a running sequence uses it or
an operator pins it, and otherwise until the room is needed (`adapter_eviction.py`). An adapter can be used in the step
that loads it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf, log2

from engine.core.messages.requests import AdapterHash, PageId


def begin_of(invocation: Sequence[int], prompt_ids: Sequence[int]) -> int | None:
    """Return the position of the first token of a prompt that an adapter applies to: 0 or, for an activated LoRA, where
    its invocation tokens begin for the last time. The tokens before are computed by the base model, so that their KV is
    that of the base model and of other activated LoRAs (Greenewald et al., "Activated LoRA", 2025). None means that the
    prompt does not have the invocation tokens."""
    if not invocation:
        return 0
    text, mark = array("I", prompt_ids).tobytes(), array("I", invocation)
    place = text.rfind(mark.tobytes())
    while place > 0 and place % mark.itemsize:  # it begins within a token
        place = text.rfind(mark.tobytes(), 0, place + mark.itemsize * len(mark) - 1)
    return None if place < 0 else place // mark.itemsize


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """Describes an adapter whose folder has been read and validated, so that it can be served."""

    adapter_hash: AdapterHash
    rank: int
    """Largest rank among the adapter's projections."""
    target_modules: tuple[str, ...]
    num_pages: int
    num_bytes: int
    """Packed size in bytes, in host memory."""
    invocation: tuple[int, ...] = ()
    """Token ids that activate the adapter: it applies from their last occurrence in a prompt on. Empty means that it
    applies to all tokens."""
    warnings: tuple[str, ...] = ()
    """What operators should know of the adapter although it is served."""


class HostCopy(Enum):
    """State of an adapter's copy in host memory: absent, being fetched (perhaps with an order to stop), or present."""

    ABSENT = "absent"
    FETCHING = "fetching"
    CANCELLED = "cancelled"
    """The adapter is being fetched, no request needs it any more, and the executor was asked to stop. It becomes
    ABSENT, or PRESENT if the read completes all the same."""
    PRESENT = "present"


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter that operators have added, with its state and statistics. `commit/adapters.py` creates it and forgets
    it after it was dropped; only `commit/adapters.py` and `commit/step.py` change it."""

    adapter_hash: AdapterHash
    num_pages: int
    rank: int = 0
    num_bytes: int = 0
    path: str = ""
    invocation: tuple[int, ...] = ()
    """Tokens that activate the adapter (see `begin_of`). Empty means that it applies to all tokens."""
    host: HostCopy = HostCopy.ABSENT
    pages: tuple[PageId, ...] = ()
    """Device pages that hold the adapter; empty if it is not resident."""
    live: int = 0
    """Number of sequences of this adapter, waiting or running."""
    running: int = 0
    last_used: float | None = None
    """When a sequence with this adapter last generated a token, in seconds on the engine's clock. None means never."""
    num_starts: int = 0
    """Number of sequences that started (for the first time) with the adapter since it became resident."""
    popularity: float = -inf
    """log2 of the weighted number of sequences that ever started with the adapter. A start weighs twice as much as one
    that was a half-life earlier."""
    pinned: bool = False
    closing: bool = False
    """The adapter was dropped: it refuses new requests and is forgotten when its last request ends."""
    hits: int = 0
    """Number of sequences whose first start with the adapter needed no copy to the device."""
    loads: int = 0
    fetches: int = 0
    load_seconds: float = 0.0
    """Duration of the last copy to the device; 0 if there was none."""
    fetch_seconds: float = 0.0
    """Duration of the last successful read from disk; 0 if there was none."""
    fetched_at: float = -inf
    """When the last successful read from disk ended, in seconds on the engine's clock."""
    failures: int = 0
    """Number of failed fetches since the last successful one."""
    failure: str = ""
    """Reason of the last failed fetch."""
    retry_at: float = 0.0
    """Time on the engine's clock, in seconds, before which the adapter is not fetched again."""

    @property
    def is_resident(self) -> bool:
        return bool(self.pages)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the adapter holds or has reserved."""
        return 0 if self.host is HostCopy.ABSENT else self.num_bytes

    @property
    def is_missing(self) -> bool:
        """Return whether live requests need the adapter and it is not resident, not in host memory and not being
        fetched."""
        return bool(self.live) and not self.pages and self.host is HostCopy.ABSENT

    def start(self, now: float, half_life: float) -> None:
        """Count a sequence that starts with the adapter at `now`, in `popularity` and `num_starts`; `half_life` is in
        seconds. A start's weight grows with time, instead of older weights decaying. The order of adapters is the same,
        and the popularity of all other adapters stays unchanged (forward decay: Cormode et al., ICDE 2009)."""
        low, high = sorted((self.popularity, now / half_life))
        self.popularity = high + log2(1 + 2 ** (low - high))
        self.num_starts += 1
