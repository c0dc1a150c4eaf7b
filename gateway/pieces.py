"""What earlier turns of a conversation were encoded to, so that only what is new in a turn has to be.

A conversation comes whole with every turn. To encode it again each time is work that grows with the square of its
turns, 1 us a token measured, and up to some length the event loop does nothing else meanwhile. Special tokens cut a
text into pieces that no tokenizer looks across: the library takes them out first, and encodes what lies between them
apart. So the ids of a text are those of its pieces, one after the other.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any

MAX_BYTES = 64 * 2**20
LARGEST = 1 / 8
"""Share of it that one piece may take: a book does not push out everybody's conversations."""
ENTRY_BYTES = 400
"""Of a piece that is remembered, beside its text and its ids."""
MAX_PIECES = 2000
"""Of one text: to look up more, at 1 us each, would hold up others. Then it is one piece."""


class Pieces:
    """Those used last. Each realm has its own: how long a prompt takes must not tell one tenant what another says.

    For one thread.
    """

    def __init__(self, backend: Any, marks: Iterable[str], max_bytes: int = MAX_BYTES) -> None:
        """`backend`: a tokenizer of the `tokenizers` library. `marks`: of its special tokens, those to cut before, but
        for any that might be read otherwise then."""
        added = backend.get_added_tokens_decoder().values()
        self._marks = [token.content for token in added if token.content in set(marks) and _cuts(token, added)]
        self._max_bytes = max_bytes
        self._bytes = 0
        self._ids: OrderedDict[tuple[str, str], array[int]] = OrderedDict()

    def cut(self, text: str) -> list[str]:
        """Pieces that make up the text; each but the first begins with a special token."""
        found = chain.from_iterable(_places(text, mark) for mark in self._marks)
        starts = sorted(islice(found, MAX_PIECES))
        if len(starts) == MAX_PIECES:
            return [text]
        return [text[start:end] for start, end in pairwise((0, *starts, len(text))) if start < end]

    def ids(self, realm: str, piece: str) -> array[int] | None:
        """None: it is not remembered."""
        found = self._ids.get((realm, piece))
        if found is not None:
            self._ids.move_to_end((realm, piece))
        return found

    def remember(self, realm: str, piece: str, ids: Sequence[int]) -> array[int]:
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
    """Whether a text may be cut before it, wherever it stands: neither is it read otherwise when apart, nor what is to
    its left. Some tokens take the space beside them, and some are none beside a letter."""
    stays = token.special and not (token.lstrip or token.single_word or token.normalized)
    firm = re.fullmatch(r"[^\w\s](.*\S)?", token.content, re.DOTALL)
    return bool(stays and firm and not any(_overlap(token.content, other.content) for other in added))


def _overlap(one: str, other: str) -> bool:
    """Whether a text may have both where they share characters."""
    if one != other and (one in other or other in one):
        return True
    ends = range(1, min(len(one), len(other)))
    return any(one[-n:] == other[:n] or other[-n:] == one[:n] for n in ends)


def _bytes(piece: str, ids: array[int]) -> int:
    return ENTRY_BYTES + sys.getsizeof(piece) + ids.itemsize * len(ids)
