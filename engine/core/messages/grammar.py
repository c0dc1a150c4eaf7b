"""A grammar that an answer must follow: the core does not interpret its text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

MOST_REPEATED = 4000
"""Tokens of an answer that may consist of one token only. Twice as many exceed a limit of the grammar library."""


class GrammarKind(Enum):
    """Language in which a grammar's text is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CONTEXT_FREE = "context_free"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar, identified by kind and text: requests with equal kind and text share one prepared grammar."""

    kind: GrammarKind
    text: str


def allowed_tokens(token_ids: Iterable[int]) -> Grammar:
    """Return the grammar of answers that consist of some tokens. It never ends by itself: only an EOS token among them
    ends an answer before its maximum length. A single token is repeated `MOST_REPEATED` times at most, because the
    grammar library follows what must come next to its end."""
    ids, ranges = sorted(set(token_ids)), list[tuple[int, int]]()
    for token_id in ids:
        first = ranges.pop()[0] if ranges and ranges[-1][1] == token_id - 1 else token_id
        ranges.append((first, token_id))
    listed = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    rest = " start" if len(ids) > 1 else f"{{{MOST_REPEATED}}}"
    return Grammar(GrammarKind.CONTEXT_FREE, f"start: <[{listed}]>{rest}")
