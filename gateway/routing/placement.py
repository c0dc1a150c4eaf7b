"""Which replicas an adapter belongs to: rendezvous ranks, and as many of them as its share of the load asks for.

Every router computes the same ranks without talking to others, and a replica that comes or goes changes the places of
its own adapters only (Thaler and Ravishankar, 1998). A replica's hash function is a multiplication by an odd number of
its own (Dietzfelbinger et al., 1997), which ranks replicas in a fraction of the time of a better mixing one, as evenly.
A score and its replica's index share 30 bits, which Python multiplies and sorts faster than longer numbers.

The number of replicas follows an adapter's share of the work with a moving average: it grows at once, and shrinks after
`COOLING_ROUNDS` rounds that ask for less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from math import ceil

from engine.core.messages.requests import AdapterHash

ROUND_S = 3.0
"""Seconds between two rounds, in which the shares are measured."""
AVERAGE_WEIGHT = 0.3
"""Weight of the last round in the moving average of an adapter's work."""
COOLING_ROUNDS = 3
"""Rounds in a row that must ask for fewer replicas before an adapter loses one."""
SPREAD = 8.0
"""Replicas of an adapter, as a multiple of those that its work would fill. Only few adapters have work enough for a
second replica, and with it they balance what the others leave uneven. In a simulation of 8 replicas and 2,000 adapters
(Zipf 1), values of 2, 4, 8 and 16 gave 18, 14, 12 and 12 MB of adapters copied per request, and 40,100, 40,900, 42,000
and 41,800 tokens/s."""
MOST_RANKED = 100_000
"""Adapters whose ranks are remembered. Each version of an adapter has another hash, so that their number grows."""
FEW = 8
"""Number of replicas of an adapter above which more of them balance no better, and take longer to compare: with 64
replicas and no such bound, a decision took 130 us at p99."""
INDEX_BITS = 0xFF
"""Bits of a score that are the replica's index."""
SCORE_BITS = 2**30 - 1 - INDEX_BITS
"""Bits of a score that are the high bits of the replica's hash of the adapter."""
FORGOTTEN_BELOW = 1e-3
"""Work, as a fraction of an average round's, below which an adapter is no longer followed."""


def hashed(name: str) -> int:
    """Return a 30-bit hash of a name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little") >> 2


@dataclass(slots=True)
class Popularity:
    """The work of one adapter, in tokens of prompts and answers, and the number of replicas that follows from it."""

    average: float = 0.0
    """Moving average of the work of a round."""
    this_round: float = 0.0
    replicas: int = 1
    low_rounds: int = 0
    """Rounds in a row that asked for fewer replicas."""


@dataclass(slots=True)
class Placement:
    """Ranks the replicas for each adapter by hashing, and sets from recent traffic how many of them it may use."""

    factors: dict[int, int] = field(default_factory=dict)
    """The odd factor of each replica's hash function, by the replica's index."""
    popularity: dict[str, Popularity] = field(default_factory=dict)
    """Adapters that had work lately."""
    _ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _round_ends: float = float("-inf")

    def join(self, index: int, name: str) -> None:
        self.factors[index] = hashed(name) | 1
        self._ranks.clear()

    def leave(self, index: int) -> None:
        del self.factors[index]
        self._ranks.clear()

    def ranks(self, key: str) -> tuple[int, ...]:
        """Return the indices of all replicas in the order in which the key, an adapter's hash, prefers them."""
        if (ranks := self._ranks.get(key)) is None:
            if len(self._ranks) >= MOST_RANKED:
                self._ranks.clear()
            number = hashed(key)
            scores = [factor * number & SCORE_BITS | index for index, factor in self.factors.items()]
            scores.sort(reverse=True)
            self._ranks[key] = ranks = tuple([score & INDEX_BITS for score in scores])
        return ranks

    def replicas(self, adapter_hash: AdapterHash) -> int:
        """Return how many replicas an adapter may use, the first of its ranks: 1 if it had no work lately."""
        popularity = self.popularity.get(adapter_hash)
        return popularity.replicas if popularity else 1

    def count(self, adapter_hash: AdapterHash, tokens: int) -> None:
        """Add the tokens of a request's prompt and answer to its adapter's work in this round."""
        if (popularity := self.popularity.get(adapter_hash)) is None:
            popularity = self.popularity[adapter_hash] = Popularity()
        popularity.this_round += tokens

    def advance(self, now: float) -> None:
        """End the round if `ROUND_S` are over at `now`, in seconds on the router's clock: update the averages and the
        adapters' numbers of replicas, and forget adapters without work."""
        if now < self._round_ends:
            return
        self._round_ends = now + ROUND_S
        followed = self.popularity.values()
        for popularity in followed:
            popularity.average += AVERAGE_WEIGHT * (popularity.this_round - popularity.average)
            popularity.this_round = 0.0
        self._resize(sum(popularity.average for popularity in followed))

    def _resize(self, total: float) -> None:
        for popularity in self.popularity.values():
            wanted = wanted_replicas(popularity.average / total if total else 0.0, len(self.factors))
            popularity.low_rounds = popularity.low_rounds + 1 if wanted < popularity.replicas else 0
            if wanted > popularity.replicas:
                popularity.replicas = wanted
            elif popularity.low_rounds >= COOLING_ROUNDS:
                popularity.replicas -= 1
                popularity.low_rounds = 0
        idle: Iterable[str] = [
            name for name, it in self.popularity.items() if it.average <= FORGOTTEN_BELOW and it.replicas == 1
        ]
        for name in idle:
            del self.popularity[name]


def wanted_replicas(share: float, num_replicas: int) -> int:
    """Return the number of replicas for an adapter that causes this share (0 to 1) of all work: `SPREAD` times the
    number that its work would fill, but no more than `FEW` or twice the number that its work would fill, whichever is
    more. The result is at least 1 and at most `num_replicas`."""
    filled = share * num_replicas
    wanted = min(ceil(filled * SPREAD), max(ceil(filled * 2), FEW))
    return min(max(1, wanted), max(1, num_replicas))
