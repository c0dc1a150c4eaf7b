"""How much of a trace's prompts a prefix cache could have held, by its size, in one pass: a block is in an LRU cache of
n blocks if fewer than n others were used since (Mattson et al., 1970)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from lab.traffic.traces import BLOCK_TOKENS, Trace


@dataclass(frozen=True, slots=True)
class Reuse:
    """Hit rates of prefix caches of different sizes on a trace: which share of its prompt tokens they find."""

    share: float
    """Share of all prompt tokens that a prefix cache without bounds finds or, for a trace that says what its server
    found, that the server found."""
    curve: dict[int, float]
    """Tokens that a cache holds, powers of two from a block up to the first size that finds all of them -> share of all
    prompt tokens that it finds. Empty for a trace without blocks."""

    def share_with(self, tokens: int) -> float:
        """Return the share of all prompt tokens that a prefix cache of so many tokens finds, by the largest size of the
        curve not above; without blocks, what the trace says."""
        return max((share for size, share in self.curve.items() if size <= tokens), default=self._least)

    @property
    def _least(self) -> float:
        return 0.0 if self.curve else self.share

    def tokens_for(self, part: float) -> int:
        """Return the size in tokens of the smallest prefix cache, of the sizes in `curve`, that finds the fraction
        `part` of what a cache without bounds finds. Raises ValueError if there is no curve."""
        return min(size for size, share in self.curve.items() if share >= part * self.share)


def measure_reuse(trace: Trace) -> Reuse:
    total = sum(arrival.prompt_tokens for arrival in trace)
    if not any(arrival.blocks for arrival in trace):
        return Reuse(sum(arrival.cached_tokens for arrival in trace) / total, {})
    by_size: Counter[int] = Counter()
    for blocks, tokens in _needed_sizes(trace):
        by_size[BLOCK_TOKENS << (blocks - 1).bit_length()] += tokens
    found = accumulate(by_size[size] for size in sorted(by_size))
    curve = {size: tokens / total for size, tokens in zip(sorted(by_size), found, strict=True)}
    return Reuse(by_size.total() / total, curve)


def _needed_sizes(trace: Trace) -> Iterator[tuple[int, int]]:
    """Yield, for each repeated use of a block in a trace's prompts, the blocks of the smallest LRU cache that finds it
    and all before it, and its number of tokens."""
    stack = _Stack(sum(len(arrival.blocks) for arrival in trace))
    for arrival in trace:
        needed, is_prefix = 0, True
        for index, block in enumerate(arrival.blocks):
            distance = stack.use(block)
            is_prefix = is_prefix and distance is not None
            if is_prefix and distance is not None:
                needed = max(needed, distance)
                tokens = min(BLOCK_TOKENS, arrival.prompt_tokens - index * BLOCK_TOKENS)
                if tokens > 0:
                    yield needed, tokens


class _Stack:
    """Computes LRU stack distances of prompt blocks, with a Fenwick tree over all uses: the number of different blocks
    that were used since a block's last use."""

    def __init__(self, uses: int) -> None:
        """`uses` is the number of calls of `use` that will follow."""
        self._tree = [0] * (uses + 1)
        self._last: dict[int, int] = {}
        """Block -> number of its last use, from 1 on."""
        self._now = 0

    def use(self, block: int) -> int | None:
        """Record a use of a block, and return its LRU stack distance: the number of different blocks, with this one,
        since its last use. None means that this is its first."""
        self._now += 1
        before = self._last.get(block)
        self._last[block] = self._now
        distance = None
        if before is not None:
            distance = len(self._last) - self._sum(before) + 1
            self._add(before, -1)
        self._add(self._now, 1)
        return distance

    def _add(self, place: int, change: int) -> None:
        while place < len(self._tree):
            self._tree[place] += change
            place += place & -place

    def _sum(self, place: int) -> int:
        total = 0
        while place:
            total += self._tree[place]
            place &= place - 1
        return total
