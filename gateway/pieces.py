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
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

MAX_BYTES = 32 * 2**20
ENTRY_BYTES = 400
"""Of a piece that is remembered, beside its text and its ids."""


class Pieces:
    """Those used last. Each realm has its own: how long a prompt takes must not tell one tenant what another says.

    For one thread.
    """

    def __init__(self, backend: Any, max_bytes: int = MAX_BYTES) -> None:
        """`backend`: a tokenizer of the `tokenizers` library."""
        added = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized]
        contents = sorted((token.content for token in added), key=len, reverse=True)  # the library takes the longest
        self._tokens = re.compile("|".join(map(re.escape, contents)) or "(?!)")
        self._cuts = {token.content for token in added if _cuts(token)}
        self._max_bytes = max_bytes
        self._bytes = 0
        self._ids: OrderedDict[tuple[str, str], array[int]] = OrderedDict()

    def cut(self, text: str) -> list[str]:
        """Pieces that make up the text; each but the first begins with a special token."""
        starts = [found.start() for found in self._tokens.finditer(text) if found[0] in self._cuts]
        return [text[start:end] for start, end in pairwise((0, *starts, len(text))) if start < end]

    def ids(self, realm: str, piece: str) -> array[int] | None:
        """None: it is not remembered."""
        found = self._ids.get((realm, piece))
        if found is not None:
            self._ids.move_to_end((realm, piece))
        return found

    def remember(self, realm: str, piece: str, ids: Sequence[int]) -> array[int]:
        known = array("I", ids)
        if (realm, piece) not in self._ids:  # two requests may have encoded it at once
            self._ids[realm, piece] = known
            self._bytes += _bytes(piece, known)
        while self._bytes > self._max_bytes:
            (_, oldest), forgotten = self._ids.popitem(last=False)
            self._bytes -= _bytes(oldest, forgotten)
        return known


def _cuts(token: Any) -> bool:
    """Whether a text may be cut before it: neither is it, nor what stands to its left, otherwise than when apart. Some
    tokens take the space to their right, and some are none before a letter."""
    apart = re.match(r"[^\w\s]", token.content)
    return bool(token.special and apart and not (token.lstrip or token.single_word))


def _bytes(piece: str, ids: array[int]) -> int:
    return ENTRY_BYTES + sys.getsizeof(piece) + ids.itemsize * len(ids)
