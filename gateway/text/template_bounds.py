"""Bounds what a chat template may compute while it renders: steps, and the sizes of the values that it makes.

A rendering cannot be interrupted, and some of its operations hold Python's lock: `{{ n ** n ** n }}` with n = 99999
takes hours. Jinja's sandbox bounds only `range`. Here each operator, call, filter and loop that can make a value larger
is counted before it runs, or right after it where its result is at most some times as large as what it reads.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_STEPS = 4_000_000
"""Maximum turns of loops and calls of one rendering, which take seconds. The longest bodies have 300,000 messages."""
MOST_TEXT = 64 * 2**20
"""Maximum length of one text or list. The longest bodies have 8 MiB by default."""
MOST_WRITTEN = 2**30
"""Maximum length of all texts and lists of one rendering together."""
MOST_BITS = 2**16
MOST_WIDTH = 256
"""Maximum width to which a text is filled, and maximum indentation."""
WIDE = re.compile(r"\d{4}")
"""What a format must not have: a width of over 999."""
WIDENING_METHODS = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs"))
WIDENING_FILTERS = frozenset(("center", "indent", "batch", "slice", "tojson", "wordwrap", "round"))
GROWING = (str, list, tuple)
COUNTED, CONCATENATED = "loralane_counted", "loralane_concatenated"
"""Names of the filters that stand for loops and for the operator `~` in what is compiled."""


class TooCostly(TemplateRuntimeError):
    """A template computes more than it may."""


class Budget(threading.local):
    """What the present rendering of a thread may still compute. Outside a rendering, as while a template is compiled,
    only single values are bounded."""

    steps = float("inf")
    written = float("inf")

    def step(self, count: int = 1) -> None:
        """Count turns of a loop, or calls. Raises TooCostly."""
        self.steps -= count
        if self.steps < 0:
            raise TooCostly(f"it takes more than {MOST_STEPS:,} turns of loops and calls")

    def write(self, length: float) -> None:
        """Count a text or a list of this length. Raises TooCostly."""
        self.written -= length
        if length > MOST_TEXT or self.written < 0:
            raise TooCostly(f"it makes a text or list of over {MOST_TEXT:,} characters, or too many of them")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates with bounds. `bound` makes one of transformers' environment."""

    intercepted_binops = frozenset(("**", "*", "+", "%"))
    budget: Budget

    def bound(self) -> None:
        """Have all filters, loops and the operator `~` counted."""
        self.budget = Budget()
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters |= {COUNTED: self._counted, CONCATENATED: self._concatenated}
        self.globals.pop("lipsum", None)
        self.concat = self._concatenated  # type: ignore[method-assign]

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """Give the renderings of this thread in the block one budget together."""
        self.budget.steps, self.budget.written = MOST_STEPS, MOST_WRITTEN
        try:
            yield
        finally:
            del self.budget.steps, self.budget.written

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        BOUNDS[operator](self.budget, left, right)
        return self.binop_table[operator](left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.budget.step()
        _check_method(__self.budget, __obj, args)
        value = super().call(__context, __obj, *args, **kwargs)
        if isinstance(value, GROWING):
            __self.budget.write(len(value))
        return value

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that checks its arguments before it runs, if it can widen a text, and counts what it
        makes."""
        budget, check = self.budget, CHECKS.get(name)

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            if isinstance(value, GROWING):
                budget.write(len(value))
            return value

        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            assert check is not None, "chosen below"
            check(budget, args, kwargs)
            return counted(*args, **kwargs)

        return counted if check is None else checked

    def _counted(self, items: Any) -> Any:
        """Return what a loop goes through, and count its turns."""
        if isinstance(items, Sized):
            self.budget.step(len(items))
            return items
        if not isinstance(items, Iterable):
            return items  # the loop itself fails
        most = MOST_STEPS + 1
        found = list(islice(items, most))
        self.budget.step(len(found))
        return found

    def _concatenated(self, parts: Iterable[Any]) -> str:
        """Return the parts as one text, as `~` and the writing of a template do."""
        texts = list(map(str, parts))
        self.budget.write(sum(map(len, texts)))
        return "".join(texts)


def bounded_environment(environment: ImmutableSandboxedEnvironment) -> BoundedEnvironment:
    """Make an environment of transformers' a bounded one, in place: nothing else creates one with its extensions."""
    environment.__class__ = BoundedEnvironment
    assert isinstance(environment, BoundedEnvironment)
    environment.bound()
    return environment


def with_bounds(tree: nodes.Template) -> nodes.Template:
    """Put filters that count in place of the sources of loops and of the operator `~`, and return the template."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filter(loop.iter, COUNTED)
    _replace_concats(tree)
    return tree


def _replace_concats(node: nodes.Node) -> None:
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_without_concat(one) for one in value])
        else:
            setattr(node, name, _without_concat(value))


def _without_concat(value: Any) -> Any:
    if isinstance(value, nodes.Node):
        _replace_concats(value)
    if isinstance(value, nodes.Concat):
        parts = nodes.List(value.nodes, lineno=value.lineno)
        parts.environment = value.environment
        return _filter(parts, CONCATENATED)
    return value


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    if node.environment is not None:
        made.set_environment(node.environment)
    return made


def _bound_power(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MOST_BITS:
        raise TooCostly(f"the operator ** makes a number of over {MOST_BITS} bits")


def _bound_product(budget: Budget, left: Any, right: Any) -> None:
    for many, count in ((left, right), (right, left)):
        if isinstance(many, GROWING) and isinstance(count, int):
            budget.write(len(many) * max(0, count))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MOST_BITS:
        raise TooCostly(f"the operator * makes a number of over {MOST_BITS} bits")


def _bound_sum(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, GROWING) and isinstance(right, GROWING):
        budget.write(len(left) + len(right))


def _bound_format(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, str):
        _check_format(budget, left, right)


BOUNDS: Mapping[str, Callable[[Budget, Any, Any], None]] = {
    "**": _bound_power,
    "*": _bound_product,
    "+": _bound_sum,
    "%": _bound_format,
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


def _check_method(budget: Budget, method: Any, args: tuple[Any, ...]) -> None:
    """Raise TooCostly if a method of a text would make too long a one."""
    method = getattr(method, "__wrapped__", method)  # the sandbox wraps `format`
    if not isinstance(method, BuiltinMethodType) or not isinstance(method.__self__, str):
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


CHECKS: Mapping[str, Callable[[Budget, tuple[Any, ...], Mapping[str, Any]], None]] = {
    **dict.fromkeys(WIDENING_FILTERS, _check_filter_width),
    "replace": _check_filter_replace,
    "format": _check_filter_format,
    "join": _check_filter_join,
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
