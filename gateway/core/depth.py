"""Limit on the nesting depth of JSON documents from callers, because later code walks them recursively."""

from __future__ import annotations

from typing import Any

from gateway.core.errors import invalid_request

MAX_DEPTH = 100
"""Maximum levels of nested objects and lists. OpenAI allows schemas 10 levels of objects, which are 20 of these."""


def check_depth(document: Any, field: str) -> None:
    """Raise ApiError (INVALID_REQUEST, naming `field`) if a document has over MAX_DEPTH levels of objects and lists."""
    if is_too_deep(document):
        raise invalid_request(f"{field} is nested more than {MAX_DEPTH} levels deep", field)


def is_too_deep(document: Any) -> bool:
    """Return True if a document has over MAX_DEPTH levels of nested objects and lists."""
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in inner if isinstance(one, dict | list)]
