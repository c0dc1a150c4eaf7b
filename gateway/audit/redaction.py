"""Keeps secrets out of the audit log: by the name of a field, by the form of a value, and by its length."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gateway.core.errors import MAX_QUOTED, clip

REDACTED = "[redacted]"
SECRET_FIELD = re.compile(r"(.*_)?(key|secret|password|token|hash|authorization|credentials)", re.IGNORECASE)
"""Names of fields whose values are secret, whatever they are."""
MADE_KEY = re.compile(r"sk-[A-Za-z0-9_-]{12,}")
"""API keys, which an administrator may have typed in place of an id or a name."""
LONG_HASH = re.compile(r"[0-9a-f]{64}")
"""A SHA-256, such as that of a key."""
URL_USER = re.compile(r"(?<=://)[^/?#\s]*@")
URL_QUERY = re.compile(r"(?<=\w)\?\S*")
MOST_ITEMS = 100
"""Maximum items of a list or object in an entry."""


def redacted(value: Any) -> Any:
    """Return plain data without secrets, users and queries of URLs, and text that is too long for a log."""
    if isinstance(value, str):
        return redacted_text(value)
    if isinstance(value, Mapping):
        items = list(value.items())[:MOST_ITEMS]
        return {redacted_text(str(name)): _field(str(name), item) for name, item in items}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value[:MOST_ITEMS]]
    return value


def redacted_text(text: str) -> str:
    text = MADE_KEY.sub(REDACTED, text)
    text = LONG_HASH.sub(lambda found: found[0][:12], text)
    if "://" in text:
        text = URL_QUERY.sub(f"?{REDACTED}", URL_USER.sub(f"{REDACTED}@", text))
    return clip("".join(character if character.isprintable() else "?" for character in text), MAX_QUOTED)


def _field(name: str, value: Any) -> Any:
    return REDACTED if value and SECRET_FIELD.fullmatch(name) else redacted(value)
