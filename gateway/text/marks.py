"""Marks in texts that come in pieces."""

from __future__ import annotations


def begun_mark(text: str, mark: str) -> int:
    """Return the length of the longest beginning of a mark, short of the whole mark, that a text ends with."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
