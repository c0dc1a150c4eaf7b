"""Shell-style patterns of names, matched without compiling those that have no wildcard but `*`."""

from __future__ import annotations

from fnmatch import fnmatchcase

WILD = "*?["


def is_compiled(pattern: str) -> bool:
    """Return whether a pattern is compiled, which takes up to 0.3 ms. Python remembers only 256 compiled patterns, so
    that others may be compiled again for each request."""
    return "?" in pattern or "[" in pattern


def matches(name: str, pattern: str) -> bool:
    """Return what `fnmatchcase` does."""
    if is_compiled(pattern):
        return fnmatchcase(name, pattern)
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    *middle, last = rest
    at, end = len(first), len(name) - len(last)
    if end < at or not (name.startswith(first) and name.endswith(last)):
        return False
    for part in middle:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
