"""Cache of the token ids of earlier turns of a conversation, so that only the new part of a turn is encoded. Special
tokens cut a text into pieces that the library encodes independently."""

from __future__ import annotations

import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any

MAX_BYTES = 64 * 2**20
"""Default maximum size of the cache in bytes."""
LARGEST = 1 / 8
"""Maximum share of the cache that one piece may take, so that one long text does not evict all conversations."""
ENTRY_BYTES = 400
"""Estimated overhead in bytes of one cached piece, in addition to its text and its ids."""
MAX_PIECES = 2000
"""Number of special tokens in a text from which on the text is not cut at all. A lookup of a piece takes 1 us, so more
pieces would delay other requests."""


class EncodeCache:
    """LRU cache of the token ids of pieces of text, for use from one thread. Each realm (a tenant) has its own entries,
    because otherwise the time that a prompt takes would tell one tenant what another tenant has sent."""

    def __init__(self, backend: Any, marks: Iterable[str], max_bytes: int = MAX_BYTES) -> None:
        """Initialize the cache.

        Args:
            backend: a tokenizer of the `tokenizers` library.
            marks: special tokens before which texts are cut. Tokens before which a cut could change the ids are
                ignored.
            max_bytes: maximum size of the cache, for all realms together.
        """
        added = backend.get_added_tokens_decoder().values()
        self._marks = [token.content for token in added if token.content in set(marks) and _cuts(token, added)]
        self._max_bytes = max_bytes
        self._bytes = 0
        self._ids: OrderedDict[tuple[str, str], array[int]] = OrderedDict()

    def cut(self, text: str) -> list[str]:
        """Return the pieces of a text, whose token ids joined are those of the text. Each piece but the first begins
        with a special token. A text with MAX_PIECES or more of these is returned in one piece."""
        found = chain.from_iterable(_places(text, mark) for mark in self._marks)
        starts = sorted(islice(found, MAX_PIECES))
        if len(starts) == MAX_PIECES:
            return [text]
        return [text[start:end] for start, end in pairwise((0, *starts, len(text))) if start < end]

    def ids(self, realm: str, piece: str) -> array[int] | None:
        """Return the cached token ids of a piece, which becomes the most recently used. None means that the piece is
        not cached for this realm."""
        found = self._ids.get((realm, piece))
        if found is not None:
            self._ids.move_to_end((realm, piece))
        return found

    def remember(self, realm: str, piece: str, ids: Sequence[int]) -> array[int]:
        """Cache the token ids of a piece, unless it takes more than LARGEST of the cache, and return them as an array.
        The least recently used pieces of any realm are evicted."""
        known = array("I", ids)
        size = _bytes(piece, known)
        if (realm, piece) in self._ids or size > LARGEST * self._max_bytes:  # two requests may have encoded it at once
            return known
        self._ids[realm, piece] = known
        self._bytes += size
        while self._bytes > self._max_bytes:
            (_, oldest), forgotten = self._ids.popitem(last=False)
            self._bytes -= _bytes(oldest, forgotten)
        return known


def _places(text: str, mark: str) -> Iterator[int]:
    at = text.find(mark)
    while at >= 0:
        yield at
        at = text.find(mark, at + len(mark))


def _cuts(token: Any, added: Iterable[Any]) -> bool:
    """Return whether a text may be cut before every occurrence of a special token without changing ids: not if it
    absorbs white space, needs or touches words, or may overlap another of `added`, all added tokens."""
    stays = token.special and not (token.lstrip or token.single_word or token.normalized)
    firm = re.fullmatch(r"[^\w\s](.*\S)?", token.content, re.DOTALL)
    return bool(stays and firm and not any(_overlap(token.content, other.content) for other in added))


def _overlap(one: str, other: str) -> bool:
    """Return whether two strings may occur in a text at overlapping positions, a string also with itself."""
    if one != other and (one in other or other in one):
        return True
    ends = range(1, min(len(one), len(other)))
    return any(one[-n:] == other[:n] or other[-n:] == one[:n] for n in ends)


def _bytes(piece: str, ids: array[int]) -> int:
    return ENTRY_BYTES + sys.getsizeof(piece) + ids.itemsize * len(ids)
