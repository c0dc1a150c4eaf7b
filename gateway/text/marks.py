"""Marks in texts that come in pieces."""

from __future__ import annotations

MOST_WHITE = 256
"""Characters of white space that are held back to see whether a mark follows. Holding back more of it, piece after
piece, would take time that grows with the square of its length: 20 seconds for 640,000 spaces."""


def begun_mark(text: str, mark: str) -> int:
    """Return the length of the longest beginning of a mark, short of the whole mark, that a text ends with."""
    # Only where the mark's first character is: trying all lengths took 30 us for each token with the marks of Harmony.
    at = text.find(mark[:1], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[:1], at + 1)
    return len(text) - at if at >= 0 else 0


def before_white(text: str) -> str:
    """Return a text without the white space at its end, or the whole text if that is more than `MOST_WHITE`."""
    shown = text.rstrip()
    return shown if len(text) - len(shown) <= MOST_WHITE else text
