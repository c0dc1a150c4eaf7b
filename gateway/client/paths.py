"""Puts names into the paths of the HTTP API."""

from __future__ import annotations

from urllib.parse import quote

from gateway.api_schema.operation import PLACEHOLDER

DOTS = ("", ".", "..")


class NameRefused(ValueError):
    """A name cannot be part of a path."""


def path_part(name: str) -> str:
    """Return a name as one part of a path. Raises NameRefused if it is empty, `.` or `..`, which the client would leave
    out, so that the call would be about something else."""
    if name in DOTS:
        raise NameRefused(f"{name!r} is no name")
    return quote(name, "")


def path_parts(name: str) -> str:
    """Return a name with slashes, such as an adapter's, as parts of a path. Raises NameRefused as `path_part` does."""
    if any(part in DOTS for part in name.split("/")):
        raise NameRefused(f"{name!r} is no name of an adapter: a part of it is empty, '.' or '..'")
    return quote(name)


def filled(path: str, *names: str) -> str:
    """Return the path of an operation with a name in place of each placeholder. Raises NameRefused as `path_part`
    does."""
    places = [path_parts if ":path" in match[0] else path_part for match in PLACEHOLDER.finditer(path)]
    parts = iter([part(name) for part, name in zip(places, names, strict=True)])
    return PLACEHOLDER.sub(lambda _: next(parts), path)
