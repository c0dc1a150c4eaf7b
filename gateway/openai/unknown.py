"""Checks the fields of a body that the gateway does not know. Misspellings of known fields are refused; fields that
other servers know are accepted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, reduce
from operator import or_
from typing import Any

from gateway.core.errors import ApiError, invalid_request
from gateway.core.tenants import UnknownFields
from gateway.openai.refused_fields import NO_EFFECT, REFUSED

MOST_NAMES = 256
"""Maximum number of distinct unknown names in a body. Each is compared with the known names, which takes some twenty
milliseconds in total at worst. No known client sends half as many."""
LONGEST_NAME = 40
"""Maximum length, in characters, of a name that is compared with known names. No known name is as long."""
MOST_ERRORS = 2
"""Maximum number of typing errors in a name that is still taken for a misspelling."""

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
"""OpenAI fields that have no effect in the gateway. They are accepted even where unknown fields are refused."""
INSIDE: Mapping[str, frozenset[str]] = {
    "stream_options": frozenset(("include_obfuscation",)),
    "response_format": frozenset(("strict", "name", "description")),
    "response_format.json_schema": frozenset(("description",)),
    "tools": frozenset(("custom",)),
}
"""Further fields of OpenAI and vLLM that objects inside a body may have without effect, by the object's path."""


def suggestion(name: str, known: frozenset[str]) -> str | None:
    """Return the known name that `name` is a misspelling of, or None: known names of up to 3 letters may differ by no
    typing error, of 4 to 8 letters by one, longer ones by two. Case and word separators (`topP`) are ignored."""
    # Long names must not reach the cache: a thousand names of 8 MiB would stay in memory.
    return _nearest(name, known) if len(name) <= LONGEST_NAME else None


@lru_cache(maxsize=1024)
def _nearest(name: str, known: frozenset[str]) -> str | None:
    plain, letters = _plain(name), _letters(name)
    alike = (other for other in known if (letters ^ _letters(other)).bit_count() <= 2 * MOST_ERRORS)
    near = {other: _distance(plain, _plain(other)) for other in alike}
    best = min(near, key=lambda other: (near[other], other), default=None)
    return best if best is not None and near[best] <= _tolerance(best) else None


def check_unknown(
    body: Mapping[str, Any], known: Mapping[str, frozenset[str]], policy: UnknownFields = "ignore"
) -> None:
    """Refuse misspelled fields, more than `MOST_NAMES` unknown names, and any unknown field if the policy is "refuse".

    Fields in OPENAI, INSIDE and REFUSED, which `refuse_unsupported` checks, always pass; those in NO_EFFECT pass unless
    the policy is "refuse".

    Args:
        body: the decoded body.
        known: the known field names of each object, by the object's path, which is empty for the body itself.
        policy: handling of unknown fields that are not misspellings.

    Raises:
        ApiError: INVALID_REQUEST.
    """
    others = OPENAI | REFUSED.keys() | (NO_EFFECT if policy == "ignore" else frozenset())
    unknown = _unknown(body, known, others)
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
            raise unknown_field(param, nearest)


def unknown_field(param: str, nearest: str | None) -> ApiError:
    """Return the ApiError (INVALID_REQUEST) for a field that does not exist. `nearest` is the known name to suggest."""
    hint = f"; did you mean {nearest!r}?" if nearest else ""
    return invalid_request(f"there is no field {param[:80]!r}{hint}", param[:80], "unknown_parameter")


def _unknown(
    body: Mapping[str, Any], known: Mapping[str, frozenset[str]], others: frozenset[str]
) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield every unknown field: its full path for error messages, its name, and the known names of its object.
    `others` are further names that the body itself, but no object in it, may have."""
    for place, names in known.items():
        if place and place.partition(".")[0] not in body:
            continue
        passing = INSIDE.get(place, frozenset()) if place else others
        for prefix, found in _objects(body, place):
            for name in found:
                if name not in names and name not in passing:
                    yield prefix + name, name, names


def _objects(body: Mapping[str, Any], place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each object of a body at a path such as `tools.function`, after the prefix for the paths of its fields,
    such as `tools[0].function.`. A list on the way stands for all of its members."""
    found: list[tuple[str, Any]] = [("", body)]
    for step in filter(None, place.split(".")):
        inner = [(f"{prefix}{step}", value.get(step)) for prefix, value in found if isinstance(value, dict)]
        found = [one for path, value in inner for one in _members(path, value)]
    return ((prefix, value) for prefix, value in found if isinstance(value, dict))


def _members(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list):
        return [(f"{path}[{index}].", member) for index, member in enumerate(value) if isinstance(member, dict)]
    return [(f"{path}.", value)]


@lru_cache(maxsize=1024)
def _letters(name: str) -> int:
    """Return a bit mask of the letters in a name, with which `suggestion` skips names that differ too much before it
    computes their distance. One typing error changes at most two bits."""
    return reduce(or_, (1 << ord(letter) % 64 for letter in _plain(name)), 0)


@lru_cache(maxsize=1024)
def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").replace(" ", "").lower()


def _tolerance(known: str) -> int:
    """Return how many typing errors are tolerated in a known name: 0 to 2, fewer in short names such as `n`, `stop` and
    `seed`, which resemble too many other words."""
    length = len(_plain(known))
    return 0 if length < 4 else 1 if length < 9 else MOST_ERRORS


def _distance(one: str, other: str) -> int:
    """Return how many letters have to be inserted, deleted, replaced or swapped with their neighbour to turn one name
    into the other, or some number above MOST_ERRORS if there are more than MOST_ERRORS."""
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
        if min(row) > MOST_ERRORS and min(before) > MOST_ERRORS:  # a swap continues from the row before
            return MOST_ERRORS + 1
    return row[-1]
