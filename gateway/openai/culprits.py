"""Says more about a body that does not fit its struct: OpenAI's code of the error, the key of the member of an object
that does not fit, and the value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.core.errors import ApiError, clip

CODES = (
    ("Object missing required field", "missing_required_parameter"),
    ("Object contains unknown field", "unknown_parameter"),
    ("Invalid enum value", "invalid_value"),
    (r"Expected `int` >", "integer_below_min_value"),
    (r"Expected `int` <", "integer_above_max_value"),
    (r"Expected `float` >", "decimal_below_min_value"),
    (r"Expected `float` <", "decimal_above_max_value"),
    (r"Expected `str` of length >", "string_below_min_length"),
    (r"Expected `str` of length <", "string_above_max_length"),
    (r"Expected `array` of length >", "empty_array"),
    (r"Expected `array` of length <", "array_above_max_length"),
    (r"Expected `object` of length <", "object_above_max_properties"),
    (r"Expected `.*`, got `", "invalid_type"),
)
"""OpenAI's codes of errors, by the beginnings of msgspec's messages."""
MEMBER = "[...]"
"""Part of a path of msgspec's that stands for a key of an object, which may be any text."""
MOST_SHOWN = 80
"""Maximum characters of a key and of a value in a message."""

_PLACE = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


def with_culprit(
    error: ApiError, message: str, document: Any, convert: Callable[[Any], object], *, shows_value: bool
) -> ApiError:
    """Return the error for msgspec's `message`, with OpenAI's code, and with the key and, if `shows_value`, the value
    that do not fit. `convert` is what raised the message for the decoded body `document`."""
    error.detail_code = next((code for pattern, code in CODES if re.match(pattern, message)), None)
    place = _PLACE.search(message)
    if place is None or error.detail_code in ("missing_required_parameter", "unknown_parameter"):
        return error
    path, is_key = place["path"], place["key"] is not None
    value = _value_at(document, path.partition(MEMBER)[0])
    if (path.endswith(MEMBER) or is_key) and isinstance(value, dict):
        key = _culprit(value, lambda members: _fits(convert, document, path.partition(MEMBER)[0], members))
        error.message = error.message.replace(":", f"[{_shown(key)}]:", 1)
        value = key if is_key else value[key]
    if shows_value and isinstance(value, str | int | float) and error.detail_code != "invalid_value":
        error.message += f"{':' if error.detail_code == 'invalid_type' else ', got'} {_shown(value)}"
    return error


def _culprit(members: Mapping[str, Any], fits: Callable[[dict[str, Any]], bool]) -> str:
    """Return the key of the first member that does not fit, of which there is one at least, by halving."""
    keys = list(members)
    while len(keys) > 1:
        first = keys[: len(keys) // 2]
        keys = keys[len(first) :] if fits({key: members[key] for key in first}) else first
    return keys[0]


def _fits(convert: Callable[[Any], object], document: Any, path: str, members: dict[str, Any]) -> bool:
    """Return whether a body would fit if the object at `path` had only these members."""
    try:
        convert(_replaced(document, [_step(step) for step in _STEP.finditer(path)], members))
    except msgspec.ValidationError:
        return False
    return True


def _replaced(document: Any, steps: list[str | int], members: dict[str, Any]) -> Any:
    if not steps:
        return members
    step, inner = steps[0], _replaced(document[steps[0]], steps[1:], members)
    if isinstance(step, int):
        return [*document[:step], inner, *document[step + 1 :]]
    return {**document, step: inner}


def _value_at(document: Any, path: str) -> Any:
    for step in _STEP.finditer(path):
        document = document[_step(step)]
    return document


def _step(found: re.Match[str]) -> str | int:
    return int(found[1]) if found[1] else found[2]


def _shown(value: Any) -> str:
    shown = value[: MOST_SHOWN + 1] if isinstance(value, str) else value  # 8 MiB of text would take 20 ms
    return clip(msgspec.json.encode(shown).decode("utf-8", "replace"), MOST_SHOWN)
