"""Which replicas hold which prefixes, as far as the router knows from the requests that it has sent."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

PREFIX_TOKENS = 256
"""Tokens between two keys of a prompt. A key a page of 16 tokens would find 8 tokens more on average, whose computation
takes less time than 16 times as many look-ups."""


def prefix_keys(tokens: Sequence[int], adapter_hash: str | None, realm: str = "") -> tuple[int, ...]:
    """Return a 64-bit key for each leading run of whole blocks of `PREFIX_TOKENS` tokens, the shortest run first.

    Args:
        tokens: the prompt's token ids.
        adapter_hash: content hash of the adapter, without which equal texts have different KV; None is the base model.
        realm: requests share prefixes only within a realm (see `engine.core.prefix.realm_of`).
    """
    digest = blake2b(f"{adapter_hash or ''}:{realm}:".encode(), digest_size=8)
    whole = memoryview(array("I", tokens))
    keys = []
    for end in range(PREFIX_TOKENS, len(tokens) + 1, PREFIX_TOKENS):
        digest.update(whole[end - PREFIX_TOKENS : end])
        keys.append(int.from_bytes(digest.copy().digest(), "little"))
    return tuple(keys)


class PrefixIndex:
    """For each prefix key, the set of replicas that hold it, as a bit mask.

    One look-up a key answers for all replicas at once. Each replica's keys are forgotten in the order in which they
    were last used, when there are more of them than its prefix cache has room for, as that forgets its pages.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._used: dict[int, OrderedDict[int, None]] = {}
        self._most_keys: dict[int, int] = {}

    def join(self, index: int, most_keys: int) -> None:
        """Begin to follow the replica with this index, whose prefix cache has room for `most_keys` keys."""
        self._used[index], self._most_keys[index] = OrderedDict(), most_keys

    def leave(self, index: int) -> None:
        """Forget a replica and all of its keys."""
        del self._most_keys[index]
        for key in self._used.pop(index):
            self._release(key, 1 << index)

    def matches(self, keys: Sequence[int]) -> list[int]:
        """Return, for each leading key that any replica holds together with all keys before it, the mask of these
        replicas."""
        masks, mask = [], -1
        for key in keys:
            mask &= self._holders.get(key, 0)
            if not mask:
                break
            masks.append(mask)
        return masks

    def add(self, index: int, keys: Sequence[int]) -> None:
        """Note that the replica with this index holds the keys, and that they were used just now."""
        used, bit, holders = self._used[index], 1 << index, self._holders
        for key in reversed(keys):  # so that the longest prefix is forgotten before those that it extends
            used[key] = None
            used.move_to_end(key)
            holders[key] = holders.get(key, 0) | bit
        while len(used) > self._most_keys[index]:
            self._release(used.popitem(last=False)[0], bit)

    def _release(self, key: int, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]


def matched_tokens(masks: Sequence[int], index: int) -> int:
    """Return how many leading prompt tokens the replica with this index holds by `masks`, `PrefixIndex.matches`."""
    bit = 1 << index
    for count in range(len(masks), 0, -1):
        if masks[count - 1] & bit:
            return count * PREFIX_TOKENS
    return 0
