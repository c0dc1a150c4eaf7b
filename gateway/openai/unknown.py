"""Fields of a body that the gateway does not know: misspellings are refused, what other servers know may pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, reduce
from operator import or_
from typing import Any

from gateway.core.errors import ApiError, invalid_request
from gateway.core.tenants import UnknownFields

MOST_NAMES = 256
"""Different unknown names that a body may have. Each is compared with the known ones: together they take some twenty
milliseconds at worst. No client is known that sends a tenth as many."""
LONGEST_NAME = 40
"""Characters; no known name is as long."""
MOST_ERRORS = 2
"""Typing errors in a name that is still taken for a misspelling."""

OPENAI = frozenset(
    (
        "moderation",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "store",
        "user",
        "verbosity",
    )
)
"""OpenAI's fields that have no effect here: they pass even where unknown fields are refused."""
FOREIGN = frozenset(("models", "top_a"))
"""Fields of other servers (OpenRouter, KoboldCpp) whose names are near to ours without being misspellings."""
INSIDE: Mapping[str, frozenset[str]] = {
    "stream_options": frozenset(("continuous_usage_stats", "include_obfuscation")),
    "response_format": frozenset(("schema", "strict", "name", "description")),
    "response_format.json_schema": frozenset(("description",)),
    "tools": frozenset(("custom",)),
}
"""By the place of an object inside a body, which other names of OpenAI's and vLLM's it may have without effect."""


@lru_cache(maxsize=1024)
def suggestion(name: str, known: frozenset[str]) -> str | None:
    """Return the known name that a name is a misspelling of; None means that it is near none.

    A short name may differ by one typing error, a long one by two; the spelling of words apart (`topP`) never matters.
    """
    if len(name) > LONGEST_NAME:
        return None
    plain, letters = _plain(name), _letters(name)
    alike = (other for other in known if (letters ^ _letters(other)).bit_count() <= 2 * MOST_ERRORS)
    near = {other: _distance(plain, _plain(other)) for other in alike}
    best = min(near, key=lambda other: (near[other], other), default=None)
    return best if best is not None and near[best] <= _tolerance(best) else None


def check_unknown(
    body: Mapping[str, Any], known: Mapping[str, frozenset[str]], policy: UnknownFields = "ignore"
) -> None:
    """Refuse misspelled fields, more than `MOST_NAMES` unknown ones, and every unknown one if the policy says so.

    Args:
        body: the decoded body.
        known: by its place, empty for the body itself, which names an object may have.

    Raises:
        ApiError: INVALID_REQUEST.
    """
    unknown = _unknown(body, known, OPENAI if policy == "refuse" else OPENAI | FOREIGN)
    compared: set[tuple[str, frozenset[str]]] = set()
    for param, name, names in unknown:
        if (name, names) in compared:
            continue
        compared.add((name, names))
        if len(compared) > MOST_NAMES:
            raise invalid_request(
                f"more than {MOST_NAMES} of the fields do not exist, {param[:80]!r} for one", param[:80]
            )
        nearest = suggestion(name, names)
        if nearest or policy == "refuse":
            raise _refusal(param, nearest)


def _refusal(param: str, nearest: str | None) -> ApiError:
    hint = f"; did you mean {nearest!r}?" if nearest else ""
    return invalid_request(f"there is no field {param[:80]!r}{hint}", param[:80])


def _unknown(
    body: Mapping[str, Any], known: Mapping[str, frozenset[str]], others: frozenset[str]
) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield every unknown field: how an error calls it, its name, and the known names of its object.

    `others`: names that the body itself may have without effect.
    """
    for place, names in known.items():
        passing = INSIDE.get(place, frozenset()) if place else others
        for prefix, found in _objects(body, place):
            for name in found:
                if name not in names and name not in passing:
                    yield prefix + name, name, names


def _objects(body: Mapping[str, Any], place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects at a place, each with what their fields' names are prefixed with."""
    found: list[tuple[str, Any]] = [("", body)]
    for step in filter(None, place.split(".")):
        inner = [(f"{prefix}{step}", value.get(step)) for prefix, value in found if isinstance(value, dict)]
        found = [one for path, value in inner for one in _members(path, value)]
    return ((prefix, value) for prefix, value in found if isinstance(value, dict))


def _members(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list):
        return [(f"{path}[{index}].", member) for index, member in enumerate(value)]
    return [(f"{path}.", value)]


@lru_cache(maxsize=1024)
def _letters(name: str) -> int:
    """Return a bit for each kind of letter that a name has. One typing error changes two bits at most."""
    return reduce(or_, (1 << ord(letter) % 64 for letter in _plain(name)), 0)


@lru_cache(maxsize=1024)
def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").replace(" ", "").lower()


def _tolerance(known: str) -> int:
    """Return how many typing errors a known name forgives: `n`, `stop` and `seed` are too near to other words."""
    length = len(_plain(known))
    return 0 if length < 4 else 1 if length < 9 else MOST_ERRORS


def _distance(one: str, other: str) -> int:
    """Return how many letters have to be typed, left out, replaced or swapped with their neighbour.

    More than MOST_ERRORS are not counted.
    """
    if abs(len(one) - len(other)) > MOST_ERRORS:
        return MOST_ERRORS + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, wanted in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
        if min(row) > MOST_ERRORS and min(before) > MOST_ERRORS:  # a swap goes on from the row before
            return MOST_ERRORS + 1
    return row[-1]
