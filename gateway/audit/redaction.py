"""Keeps secrets out of the audit log: by the name of a field, by the form of a value, and by its length."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gateway.core.errors import MAX_QUOTED, clip

REDACTED = "[redacted]"
SECRET_FIELD = re.compile(r"(.*_)?(key|secret|password|token|hash|authorization|credentials)", re.IGNORECASE)
"""Names of fields whose values are secret, whatever they are."""
MADE_KEY = re.compile(r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{8,}")
"""API keys, which an administrator may have typed in place of an id or a name."""
LONG_HASH = re.compile(r"[0-9a-f]{64}")
"""A SHA-256, such as that of a key."""
URL_USER = re.compile(r"(?<=://)[^/?#\s]*@")
URL_QUERY = re.compile(r"(?<=\S)\?\S*")
MOST_ITEMS, MOST_FIELDS = 10, 40
"""Maximum items of a list, and of an object, in an entry."""
MOST_NAME = 64
"""Maximum characters of a field's name."""


def redacted(value: Any, most: int = MAX_QUOTED) -> Any:
    """Return plain data without secrets, users and queries of URLs, texts of more than `most` characters and lists that
    are too long for a log."""
    if isinstance(value, str):
        return redacted_text(value, most)
    if isinstance(value, Mapping):
        items = list(value.items())
        shown = {redacted_text(str(name), MOST_NAME): _field(str(name), one, most) for name, one in items[:MOST_FIELDS]}
        return shown if len(items) <= MOST_FIELDS else {**shown, "…": _more(len(items) - MOST_FIELDS)}
    if isinstance(value, list | tuple):
        first = [redacted(item, most) for item in value[:MOST_ITEMS]]
        return first if len(value) <= MOST_ITEMS else [*first, _more(len(value) - MOST_ITEMS)]
    return value


def redacted_text(text: str, most: int = MAX_QUOTED) -> str:
    text = MADE_KEY.sub(REDACTED, text)
    text = LONG_HASH.sub(lambda found: found[0][:12], text)
    if "://" in text:
        text = URL_QUERY.sub(f"?{REDACTED}", URL_USER.sub(f"{REDACTED}@", text))
    return clip("".join(character if character.isprintable() else "?" for character in text), most)


def _more(count: int) -> str:
    return f"… {count} more"


def _field(name: str, value: Any, most: int) -> Any:
    return REDACTED if value and SECRET_FIELD.fullmatch(name) else redacted(value, most)
