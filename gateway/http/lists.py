"""Lists as OpenAI pages them, and the numbers that ask for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.errors import invalid_request

MAX_DIGITS = 9


def list_page(data: Sequence[Mapping[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def number_from(text: str, param: str, least: int, most: int) -> int:
    """What a caller has written as a number. Raises ApiError: INVALID_REQUEST, it is none from `least` to `most`."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else -1
    if not least <= number <= most:
        raise invalid_request(f"{param} must be a number from {least} to {most}", param)
    return number
