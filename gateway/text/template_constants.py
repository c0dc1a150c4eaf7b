"""Refuses chat templates whose constants would take too long: Jinja computes them as it compiles a template, holding
Python's lock, without any time limit. An example that never ends is `{{ 9 ** 9 ** 9 }}`."""

from __future__ import annotations

import re
from math import log10, prod
from typing import NamedTuple

from jinja2 import Environment, nodes

MOST_FOLDED = 4_000_000
"""Maximum size of all constants together that Jinja may compute for a template, in characters. They take up to a
second."""
CAP = 10**12
"""Sizes above this are not told apart, so that no number here becomes large."""
GROWTH, LEAST_GROWN = 12, 100
"""A value becomes at most GROWTH times as long when it is written or filtered, as an emoji does in `urlencode`, or
LEAST_GROWN characters long, as in `center`."""
WRITTEN = 24
"""Maximum characters of a float, a boolean or none, and of what surrounds all members of a list."""
AROUND = 4
"""Characters that surround each member of a written list: quotes, a comma and a space."""
WIDE = re.compile(r"\*|\d{4}")
"""What a text must not contain to be formatted: a width from elsewhere, or one above 999."""
CONVERTED = 1500
"""Maximum characters of a number that is formatted with such a width, or that `int` makes of a short text."""
DIGITS = re.compile(r"[0-9]{1,12}")
ARITHMETIC = (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow, nodes.UnaryExpr)
NUMBERS = ("int", "float")
"""Filters that make a number of any value."""
INDENTING = ("tojson", "pprint")
"""Filters that may indent each member of a document, by its depth."""
FOLDED = (
    nodes.BinExpr,
    nodes.UnaryExpr,
    nodes.Filter,
    nodes.Test,
    nodes.Compare,
    nodes.Operand,
    nodes.Concat,
    nodes.List,
    nodes.Tuple,
    nodes.Dict,
    nodes.Pair,
    nodes.Keyword,
    nodes.Getitem,
    nodes.Getattr,
    nodes.Slice,
    nodes.CondExpr,
)
"""Expressions that Jinja computes if all their parts are constants."""


class Size(NamedTuple):
    """Upper bounds of a constant expression's value."""

    length: float
    """Characters of the value when it is written, apart from the escapes of texts in lists."""
    amount: float = 1
    """Amount of the value if it is a number, and of the numbers in it. Texts and lists are repeated so many times."""


def check_constants(environment: Environment, template: str) -> None:
    """Parse a chat template without compiling it. Raises ValueError, which names line and operation, for large, many or
    unbounded constants, and TemplateSyntaxError if it is no valid Jinja."""
    _Check().size(environment.parse(template))


class _Check:
    """Adds up what Jinja computes for one template."""

    def __init__(self) -> None:
        self._total = 0.0

    def size(self, node: nodes.Node) -> Size | None:
        """Return the size of a constant expression; None means that it is none. Raises ValueError if it, with all
        that was counted before, must not be computed."""
        sizes = [self.size(part) for part in node.iter_child_nodes()]
        if isinstance(node, nodes.Const):
            return _size_of_literal(node.value)
        if not isinstance(node, FOLDED) or (isinstance(node, nodes.Filter) and node.node is None):
            return None
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        length, amount = _computed(node, known)
        self._total += length
        if self._total > MOST_FOLDED:
            raise ValueError(f"line {node.lineno}: {_name(node)} of constants, which would take too long to compile")
        return Size(length, max(1, min(CAP, amount)))


def _size_of_literal(value: object) -> Size:
    if isinstance(value, str):
        return Size(max(1, len(value)))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Size(WRITTEN)
    length = WRITTEN if isinstance(value, float) else 2 + value.bit_length() // 3
    return Size(length, max(1, min(CAP, abs(value))))


def _computed(node: nodes.Node, parts: list[Size]) -> Size:
    """Return the size of what a node makes of constants of these sizes."""
    length = WRITTEN + sum(part.length + AROUND for part in parts)
    if _formats(node):
        return Size(_formatted(node, length))
    if isinstance(node, nodes.Concat):
        return Size(sum(map(_written, node.nodes, parts)))
    if isinstance(node, nodes.Filter):
        return _filtered(node, parts)
    if isinstance(node, nodes.Pow):
        return _power(node, parts)
    if isinstance(node, nodes.Mul) and not _is_number(node):
        left, right = parts
        return Size(left.length * right.amount + right.length * left.amount, left.amount * right.amount)
    return Size(length, _amount(node, [part.amount for part in parts]))


def _amount(node: nodes.Node, amounts: list[float]) -> float:
    """Return the amount of an expression that is no longer than its parts together."""
    if isinstance(node, nodes.Mul):
        return prod(amounts)
    if isinstance(node, nodes.Mod):
        return amounts[1]
    if isinstance(node, nodes.Div | nodes.FloorDiv):
        divisor = _literal(node.right)
        return amounts[0] if isinstance(divisor, int) and divisor >= 1 else CAP  # one below 1 makes it larger
    return sum(amounts)


def _power(node: nodes.Pow, parts: list[Size]) -> Size:
    base, exponent = (part.amount for part in parts)
    are_whole = all(isinstance(_literal(part), int) for part in (node.left, node.right))
    is_small = are_whole and exponent * log10(base) < log10(CAP)
    return Size(WRITTEN, base**exponent) if is_small else Size(CAP, CAP)


def _filtered(node: nodes.Filter, parts: list[Size]) -> Size:
    value, *arguments = parts
    if node.name in NUMBERS:
        return Size(CONVERTED + value.length, _converted(node, value))
    length = GROWTH * value.length * prod(argument.length * argument.amount for argument in arguments)
    if node.name in INDENTING:
        length *= 2 * _height(node)  # a filter nests by two levels at most, as `groupby` does
    return Size(max(LEAST_GROWN, length), max(LEAST_GROWN, length) * value.amount)


def _converted(node: nodes.Filter, value: Size) -> float:
    """Return the amount of what is made a number. Unless it is one, it must be a literal of digits: `int` also reads
    texts such as `9e9`, and in other bases."""
    if _is_number(node.node):
        return value.amount
    text = _literal(node.node)
    is_plain = isinstance(text, str) and DIGITS.fullmatch(text) and len(list(node.iter_child_nodes())) == 1
    return int(str(text)) if is_plain else CAP


def _written(part: nodes.Node, size: Size) -> float:
    """Return the length of a part of a text. Lists write their texts with escapes."""
    is_plain = isinstance(part, nodes.Const | nodes.Concat) or _is_number(part)
    return size.length if is_plain else GROWTH * size.length


def _height(node: nodes.Node) -> int:
    return 1 + max(map(_height, node.iter_child_nodes()), default=0)


def _is_number(node: nodes.Node | None) -> bool:
    """Return whether a node is an arithmetic expression of numbers."""
    if isinstance(_literal(node), int | float) or _filter(node) in NUMBERS:
        return True
    return isinstance(node, ARITHMETIC) and all(map(_is_number, node.iter_child_nodes()))


def _literal(node: nodes.Node | None) -> object:
    return node.value if isinstance(node, nodes.Const) else None


def _formats(node: nodes.Node) -> bool:
    return _filter(node) == "format" or (isinstance(node, nodes.Mod) and not _is_number(node.left))


def _formatted(node: nodes.Node, length: float) -> float:
    """Return a bound of the length of a formatted text, whose parts have this length together."""
    template = _literal(next(node.iter_child_nodes()))
    if not isinstance(template, str) or WIDE.search(template):
        return CAP
    return len(template) * (CONVERTED + GROWTH * length)


def _filter(node: nodes.Node | None) -> str:
    return node.name if isinstance(node, nodes.Filter) else ""


def _name(node: nodes.Node) -> str:
    """Return what an operator or a filter is called in messages."""
    return f"the filter {node.name}" if isinstance(node, nodes.Filter) else f"the operator {type(node).__name__}"
