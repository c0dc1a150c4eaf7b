"""Puts names into the paths of the HTTP API."""

from __future__ import annotations

from urllib.parse import quote

DOTS = ("", ".", "..")


def path_part(name: str) -> str:
    """Return a name as one part of a path. Raises ValueError if it is empty, `.` or `..`, which the client would leave
    out, so that the call would be about something else."""
    if name in DOTS:
        raise ValueError(f"{name!r} is no name")
    return quote(name, "")


def path_parts(name: str) -> str:
    """Return a name with slashes, such as an adapter's, as parts of a path. Raises ValueError as `path_part` does."""
    if any(part in DOTS for part in name.split("/")):
        raise ValueError(f"{name!r} is no name of an adapter: a part of it is empty, '.' or '..'")
    return quote(name)
