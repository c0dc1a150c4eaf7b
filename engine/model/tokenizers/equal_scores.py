"""Refuses SentencePiece vocabularies in which pieces of equal score could give other token ids than SentencePiece's. Of
such pieces it merges the leftmost in a text first, and the library tokenizers the one that is listed first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from engine.model.tokenizers.vocabulary import Kind

LONGEST_RUN = 32
"""Maximum length of pieces of one repeated character whose scores may be equal. Those of Llama have up to 16 spaces."""


def check_equal_scores(pieces: Sequence[tuple[str, int]], scores: Sequence[float]) -> None:
    """Raise ValueError, to whose message the caller adds the file's name, if two pieces of equal score are merged of
    others. Those of one repeated character may be, as in Llama, if both orders give the same."""
    merged = {text for text, kind in pieces if kind in (Kind.NORMAL, Kind.UNUSED)}
    equal: dict[float, list[str]] = {}
    for (text, _), score in zip(pieces, scores, strict=True):
        if len(text) > 1 and text in merged:
            equal.setdefault(score, []).append(text)
    for group in equal.values():
        spelled = [text for text in group if _is_spelled(text, merged)] if len(group) > 1 else []
        if len(spelled) > 1 and not _are_alike(spelled, merged):
            raise ValueError(f"has the pieces {spelled[0][:80]!r} and {spelled[1][:80]!r} with one score")


def _is_spelled(text: str, known: set[str]) -> bool:
    return any(text[:cut] in known and text[cut:] in known for cut in range(1, len(text)))


def _are_alike(texts: Sequence[str], merged: set[str]) -> bool:
    """Return whether pieces are runs of one character which both orders make of longer runs, and no other piece has
    several of it in a row."""
    letter, longest = texts[0][0], max(map(len, texts))
    if set("".join(texts)) != {letter} or longest > LONGEST_RUN:
        return False
    if any(2 * letter in text for text in merged.difference(texts)):
        return False
    ranks = {len(text): rank for rank, text in enumerate(texts)}
    leftmost = dict.fromkeys(ranks, 0)
    return all(_parts(count, ranks.get) == _parts(count, leftmost.get) for count in range(2, 4 * longest))


def _parts(count: int, rank_of: Callable[[int], int | None]) -> list[int]:
    """Return the lengths of the pieces of a run of `count` characters, if those of the lowest rank are merged first,
    and of these the leftmost."""
    parts = [1] * count
    while True:
        ranked = [
            (rank, place) for place, pair in enumerate(pairwise(parts)) if (rank := rank_of(sum(pair))) is not None
        ]
        if not ranked:
            return parts
        _, place = min(ranked)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
