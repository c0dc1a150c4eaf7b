"""Parser for numbers as people write them, shared by command lines, configuration files and specifications."""

from __future__ import annotations

import re

COUNT = re.compile(r"(\d+(?:\.\d+)?)([km]?)", re.ASCII | re.IGNORECASE)
MAX_COUNT = 2**63 - 1
"""Largest number that `parse_count` returns: the largest value of a signed 64-bit field of a message."""
MAX_TEXT = 64
"""Maximum length of the text that `parse_count` reads, in characters."""
SCALES = {"": 1, "k": 1_000, "m": 1_000_000}


def parse_count(text: str) -> int:
    """Read a whole number such as `600`, `100k`, `1.5m`, `1_000` or `1,000`; k is a thousand and m a million. Raises
    ValueError if the text is no such number, not whole, larger than `MAX_COUNT`, or longer than `MAX_TEXT`."""
    match = COUNT.fullmatch(re.sub(r"(?<=\d)[_,](?=\d)", "", text.strip())) if len(text) <= MAX_TEXT else None
    if match is not None:
        whole, _, fraction = match[1].partition(".")
        value, rest = divmod(int(whole + fraction) * SCALES[match[2].lower()], int("1" + "0" * len(fraction)))
        if not rest and value <= MAX_COUNT:
            return value
    raise ValueError(f"{text[:MAX_TEXT]!r} is no whole number: write one such as 600, 100k or 1.5m")
