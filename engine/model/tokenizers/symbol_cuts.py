"""Where a text is cut so that the library tokenizers finds the symbols of a SentencePiece vocabulary, which count
before merges. What lies between is cut further where merges leave it in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from tokenizers import Encoding, Regex, Tokenizer, pre_tokenizers

MOST_UNREACHED = 8192
"""Maximum number of tokens that merges do not reach: each text is compared with their beginnings."""
MOST_NESTED = 32
"""Maximum depth of the groups in a regular expression: the library's own limit and Python's are far above it."""


def cut_at(symbols: Sequence[str], tokenizer: Tokenizer, unknown: str | None) -> Iterator[pre_tokenizers.PreTokenizer]:
    """Yield what cuts a text at symbols, and let the tokenizer take what lies between two cuts for one token. Raises
    ValueError if a token would then be taken where merges do not lead to it."""
    yield pre_tokenizers.Split(Regex(any_of(symbols)), "isolated")
    others = sorted(set(tokenizer.get_vocab()).difference(symbols))
    unreached = dict(_unreached(others, tokenizer, unknown))
    tokenizer.model.ignore_merges = True
    if len(unreached) > MOST_UNREACHED:
        raise ValueError(f"has more than {MOST_UNREACHED:,} tokens that its merges do not reach")
    if unreached:
        yield pre_tokenizers.Split(Regex(_before_rests(unreached)), "isolated")


def _unreached(texts: Sequence[str], tokenizer: Tokenizer, unknown: str | None) -> Iterator[tuple[str, int]]:
    """Yield the texts of tokens that merges leave in parts, with the length of the first part."""
    for text, found in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if found.tokens == [text]:
            continue
        cut = _first_part(text, found, unknown)
        if cut >= len(text):
            raise ValueError(f"has the token {text[:80]!r}, which its pieces cannot spell")
        yield text, cut


def _first_part(text: str, found: Encoding, unknown: str | None) -> int:
    first = found.tokens[0]
    if text.startswith(first) and first != text:
        return len(first)
    # All other tokens stand for a byte, and those of a character must stay together.
    return int(found.offsets[0][1]) if first == unknown else 1


def _before_rests(unreached: dict[str, int]) -> str:
    """Return a regular expression that matches the first part of each text, and then that of what is left."""
    rests: dict[str, list[str]] = {}
    for text, cut in unreached.items():
        rests.setdefault(text[:cut], []).append(text[cut:])
    return "|".join(rf"\G{_exactly(first)}(?={any_of(rest)}\z)" for first, rest in rests.items())


def any_of(texts: Sequence[str], depth: int = 0) -> str:
    """Return a regular expression that matches the longest of these texts. What several begin with is in it once, so
    that the time of a search does not grow with their number."""
    if depth == MOST_NESTED:
        return f"(?:{'|'.join(map(_exactly, sorted(texts, key=len, reverse=True)))})"
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:1], []).append(text)
    return f"(?:{'|'.join(_group(group, depth) for group in groups.values())})"


def _group(texts: Sequence[str], depth: int) -> str:
    """Return a regular expression that matches the longest of texts that begin alike."""
    both = zip(min(texts), max(texts), strict=False)
    begin = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))
    rests = [text[len(begin) :] for text in texts if text != begin]
    if not rests:
        return _exactly(begin)
    return _exactly(begin) + any_of(rests, depth + 1) + ("?" if len(rests) < len(texts) else "")


def _exactly(text: str) -> str:
    return "".join(rf"\x{{{ord(character):x}}}" for character in text)
