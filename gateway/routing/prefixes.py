"""Which replicas hold which prefixes, as far as the router knows from the requests that it has sent."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

PREFIX_TOKENS = 256
"""Tokens between two keys of a prompt. With a key for each page of 16 tokens, a match would be 8 tokens longer on
average, whose computation takes less time than 16 times as many look-ups."""


HELD, AGAIN = 1, 2
"""The two bits of a mask for each replica, from bit 2 * index on: the replica holds the key, and the key was used again
since CLOCK last considered it for eviction (the reference bit)."""
MOST_SPARED = 8
"""Maximum number of keys that get a second chance for each key that is evicted."""


def prefix_keys(tokens: Sequence[int], adapter_hash: str | None, realm: str = "", begin: int = 0) -> tuple[int, ...]:
    """Return a 64-bit key for each leading run of whole blocks of `PREFIX_TOKENS` tokens, the shortest run first.

    Args:
        tokens: the prompt's token ids.
        adapter_hash: content hash of the adapter, without which equal texts have different KV; None is the base model.
        realm: requests share prefixes only within a realm (see `engine.core.memory.prefix.realm_of`).
        begin: position of the first token that the adapter applies to. Blocks before it are the base model's.
    """
    digest = blake2b(f"{'' if begin else adapter_hash or ''}:{realm}:".encode(), digest_size=8)
    whole = memoryview(array("I", tokens))
    keys = []
    for end in range(PREFIX_TOKENS, len(tokens) + 1, PREFIX_TOKENS):
        if end - PREFIX_TOKENS <= begin < end and begin:
            digest.update(f":{adapter_hash}:{begin}:".encode())
        digest.update(whole[end - PREFIX_TOKENS : end])
        keys.append(int.from_bytes(digest.copy().digest(), "little"))
    return tuple(keys)


class PrefixIndex:
    """For each prefix key, the set of replicas that hold it, as a bit mask.

    One look-up a key answers for all replicas at once. When a replica has more keys than its prefix cache has room for,
    the oldest is evicted; a key that was used since it was last considered goes to the end of the queue instead. This
    is the CLOCK algorithm (Corbató, 1968), which costs half as much as LRU.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._turns: dict[int, deque[int]] = {}
        """CLOCK queue of each replica's keys, by the replica's index; the next candidate for eviction comes first."""
        self._most_keys: dict[int, int] = {}

    def join(self, index: int, most_keys: int) -> None:
        """Begin to follow the replica with this index, whose prefix cache has room for `most_keys` keys."""
        self._turns[index], self._most_keys[index] = deque(), most_keys

    def leave(self, index: int) -> None:
        """Forget a replica and all of its keys."""
        del self._most_keys[index]
        for key in self._turns.pop(index):
            self._release(key, index)

    def matches(self, keys: Sequence[int]) -> list[int]:
        """Return a mask for each leading key, for `matched_tokens`: the replicas that hold this key and all keys before
        it. The list ends before the first key for which there is no such replica."""
        masks, mask = [], -1
        for key in keys:
            mask &= self._holders.get(key, 0)
            if not mask:
                break
            masks.append(mask)
        return masks

    def add(self, index: int, keys: Sequence[int]) -> None:
        """Note that the replica with this index holds the keys, and that they were used just now."""
        turns, holders = self._turns[index], self._holders
        held, again = HELD << 2 * index, AGAIN << 2 * index
        for key in reversed(keys):  # so that the longest prefix is forgotten before those that it extends
            mask = holders.get(key, 0)
            if not mask & held:
                turns.append(key)
                holders[key] = mask | held
            elif not mask & again:
                holders[key] = mask | again
        if (surplus := len(turns) - self._most_keys[index]) > 0:
            self._forget(index, surplus)

    def _forget(self, index: int, surplus: int) -> None:
        """Evict `surplus` keys of a replica from the front of its CLOCK queue. Keys that were used again get a second
        chance, but only a bounded number, so that one request does not pay for all."""
        turns, again = self._turns[index], AGAIN << 2 * index
        spared = surplus * MOST_SPARED
        while surplus:
            key = turns.popleft()
            if spared and self._holders[key] & again:
                spared -= 1
                self._holders[key] ^= again
                turns.append(key)
            else:
                surplus -= 1
                self._release(key, index)

    def _release(self, key: int, index: int) -> None:
        left = self._holders[key] & ~((HELD | AGAIN) << 2 * index)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]


def matched_tokens(masks: Sequence[int], index: int) -> int:
    """Return how many leading prompt tokens the replica with this index holds, by the result `masks` of
    `PrefixIndex.matches`; 0 if none."""
    held = HELD << 2 * index
    for count in range(len(masks), 0, -1):
        if masks[count - 1] & held:
            return count * PREFIX_TOKENS
    return 0
