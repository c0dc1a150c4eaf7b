"""What a model of text reads in place of parts of a tool's result that are no text."""

from __future__ import annotations

MOST_LETTERS = 80


def left_out(kind: str) -> str:
    """Return the sentence that replaces a part of the type `kind`, such as `image`."""
    return f"[A part of this result is left out, because this model reads text only: {kind[:MOST_LETTERS]}]"
