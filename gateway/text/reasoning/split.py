"""Text of an answer, split into its reasoning and the rest."""

from __future__ import annotations

from typing import NamedTuple


class Split(NamedTuple):
    """New text of an answer: the part that is reasoning, and the part after it."""

    reasoning: str
    text: str
