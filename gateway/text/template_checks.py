"""Checks operators, methods and filters of chat templates before they run: what they make, and how long they take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sized
from types import BuiltinMethodType
from typing import Any

from gateway.text.template_budget import CONTAINERS, Budget, TooCostly

MOST_BITS = 2**16
MOST_WIDTH = 256
"""Maximum width to which a text is filled, and maximum indentation."""
WIDE = re.compile(r"\d{4}")
"""What a format must not have: a width of over 999."""
WIDENING_METHODS = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs"))
WIDENING_FILTERS = frozenset(("center", "indent", "batch", "slice", "wordwrap", "round"))
GROWING = (str, list, tuple)


def _bound_digits(budget: Budget, left: Any, right: Any) -> None:
    """Count what an operator takes with long numbers, such as 300 steps for two of 32,768 bits."""
    if isinstance(left, int) and isinstance(right, int):
        budget.step(left.bit_length() * right.bit_length() >> 22)


def _bound_power(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MOST_BITS:
        raise TooCostly(f"the operator ** makes a number of over {MOST_BITS} bits")
    _bound_digits(budget, left, left)


def _bound_product(budget: Budget, left: Any, right: Any) -> None:
    for many, count in ((left, right), (right, left)):
        if isinstance(many, GROWING) and isinstance(count, int):
            budget.write(len(many) * max(0, count))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MOST_BITS:
        raise TooCostly(f"the operator * makes a number of over {MOST_BITS} bits")
    _bound_digits(budget, left, right)


def _bound_sum(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, GROWING) and isinstance(right, GROWING):
        budget.write(len(left) + len(right))


def _bound_format(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, str):
        budget.read(right)
        _check_format(budget, left, right)
    _bound_digits(budget, left, right)


BOUNDS: Mapping[str, Callable[[Budget, Any, Any], None]] = {
    "**": _bound_power,
    "*": _bound_product,
    "+": _bound_sum,
    "%": _bound_format,
    "//": _bound_digits,
}
"""What bounds an operator, before it computes. Each raises TooCostly."""


def _check_format(budget: Budget, template: Any, values: Any) -> None:
    """Raise TooCostly if a text with `%` may become too long with these values. A width of `*` is refused."""
    text = str(template)
    if WIDE.search(text) or "*" in text.replace("**", ""):
        raise TooCostly("it formats a text to a width of over 999 characters, or to one from elsewhere")
    parts = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
    longest = max((len(part) for part in parts if isinstance(part, Sized)), default=0)
    budget.write(len(text) + text.count("%") * longest)


def check_method(budget: Budget, method: Any, args: tuple[Any, ...]) -> None:
    """Raise TooCostly if a method of a text would make too long a one."""
    method = getattr(method, "__wrapped__", method)  # the sandbox wraps `format`
    if not isinstance(method, BuiltinMethodType):
        return
    if isinstance(method.__self__, list | tuple) and any(isinstance(one, CONTAINERS) for one in args):
        budget.read(method.__self__)  # which `index` and `count` compare
    budget.skim(method.__self__)
    if not isinstance(method.__self__, str):
        return
    text, name = method.__self__, method.__name__
    if name in WIDENING_METHODS:
        _check_width(args)
    elif name == "replace":
        _check_replace(budget, [text, *(one for one in args if isinstance(one, str))])
    elif name == "join":
        _check_join(budget, [text, *(one for one in args if isinstance(one, list | tuple))])
    elif name in ("format", "format_map") and (WIDE.search(text) or re.search(r"\{[^}]*\{", text)):
        raise TooCostly("it formats a text to a width of over 999 characters, or to one from elsewhere")


def _check_filter_width(budget: Budget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _check_width((*args[1:], *kwargs.values()))


def _check_filter_replace(budget: Budget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _check_replace(budget, [one for one in (*args, *kwargs.values()) if isinstance(one, str)])


def _check_filter_format(budget: Budget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _check_format(budget, args[0], args[1:] or kwargs)


def _check_filter_join(budget: Budget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    _check_join(budget, [one for one in (*args, *kwargs.values()) if isinstance(one, GROWING)])


def _check_filter_int(budget: Budget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if isinstance(args[0], str) and len(args[0]) > MOST_BITS // 8:
        raise TooCostly(f"it reads a number of over {MOST_BITS // 8} characters")


def _check_filter_json(budget: Budget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Count the indentation and the separators of each value."""
    widths = (one for name, one in kwargs.items() if name in ("indent", "separators"))
    _check_filter_width(budget, args, kwargs)
    budget.write_json(args[0], sum(map(_width, (*args[2:], *widths))))


def _width(option: Any) -> int:
    """Return how long an option of `tojson` makes what is written for a value."""
    if isinstance(option, list | tuple):
        return sum(map(_width, option))
    return len(option) if isinstance(option, str) else option if isinstance(option, int) else 0


def _check_filter_sum(budget: Budget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse sums of lists, each of which is copied with every list that is added."""
    if any(isinstance(one, GROWING) for one in (*args[3:], kwargs.get("start"))):
        items = args[1]
        budget.step(len(items) * sum(len(one) for one in items if isinstance(one, Sized)))


CHECKS: Mapping[str, Callable[[Budget, tuple[Any, ...], Mapping[str, Any]], None]] = {
    **dict.fromkeys(WIDENING_FILTERS, _check_filter_width),
    "replace": _check_filter_replace,
    "format": _check_filter_format,
    "join": _check_filter_join,
    "int": _check_filter_int,
    "tojson": _check_filter_json,
    "sum": _check_filter_sum,
}
"""What bounds a filter, by its name, before it runs. Each raises TooCostly."""


def _check_width(args: Iterable[Any]) -> None:
    if any(isinstance(one, int) and one > MOST_WIDTH for one in args):
        raise TooCostly(f"it fills or indents a text by more than {MOST_WIDTH} characters")


def _check_replace(budget: Budget, texts: list[str]) -> None:
    if len(texts) >= 3:
        text, old, new = texts[:3]
        budget.write(len(text) + text.count(old) * len(new))


def _check_join(budget: Budget, parts: list[Any]) -> None:
    """Count a text between the members of a list, whichever of both comes first."""
    lengths = [len(part) for part in parts[:2]]
    if len(lengths) == 2:
        budget.write(lengths[0] * lengths[1])
