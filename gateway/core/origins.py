"""Origins of web pages, as browsers spell them in the `Origin` header, and the patterns that configuration allows."""

from __future__ import annotations

import re
from collections.abc import Sequence

ANY = "*"
LOOPBACK = ("http://localhost:*", "http://127.0.0.1:*", "http://[::1]:*")
"""Origin patterns of pages that are served by the caller's own machine, on any port."""
ORIGIN = re.compile(r"https?://(?P<host>[a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:]+\])(:(?P<port>\d{1,5}|\*))?")


def check_origin(value: str) -> None:
    """Check one configured origin.

    Raises:
        ValueError: browsers never send an origin like this, so it would allow nothing.
    """
    if value != ANY and not ORIGIN.fullmatch(value):
        raise ValueError(
            f"cors_origins must hold origins such as https://chat.example.com or http://localhost:*, in lower case and "
            f"without a path, or * alone, not {value!r}"
        )


def check_origins(values: Sequence[str]) -> None:
    """Check the configured origins.

    Raises:
        ValueError: one of them is not a valid origin, or `*` stands beside other origins.
    """
    for value in values:
        check_origin(value)
    if ANY in values and len(values) > 1:
        raise ValueError("cors_origins holds * and other origins: * allows all of them, so leave the others out")


def origin_pattern(values: Sequence[str]) -> str:
    """Return a regular expression that fully matches the allowed origins. A port of `*` matches any port, or none."""
    return "|".join(_pattern(value) for value in values)


def _pattern(value: str) -> str:
    bare = value.removesuffix(":*")
    return re.escape(value) if bare == value else re.escape(bare) + r"(?::\d{1,5})?"
