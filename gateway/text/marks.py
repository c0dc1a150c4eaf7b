"""Helpers that find marks, such as `<think>`, in a text that comes in pieces."""

from __future__ import annotations

MOST_WHITE = 256
"""Maximum characters of white space that are held back to see whether a mark follows. Holding back more, piece after
piece, would take time that grows with the square of its length: 20 seconds for 640,000 spaces."""


def begun_mark(text: str, mark: str) -> int:
    """Return the length of the longest proper prefix of `mark` that `text` ends with; 0 if it ends with none."""
    # Only where the mark's first character is: trying all lengths took 30 us for each token with the marks of Harmony.
    at = text.find(mark[:1], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[:1], at + 1)
    return len(text) - at if at >= 0 else 0


def before_white(text: str) -> str:
    """Return a text without its trailing white space, or unchanged if that is longer than `MOST_WHITE`."""
    shown = text.rstrip()
    return shown if len(text) - len(shown) <= MOST_WHITE else text
