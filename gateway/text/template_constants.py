"""Refuses chat templates whose constants would take too long to compile.

Jinja computes constant expressions while it compiles a template. It holds Python's lock meanwhile, and no time limit of
a rendering applies: `{{ 9 ** 9 ** 9 }}` never ends, and `{{ 'a' * 100000000 }}` takes 11 s. transformers creates the
environment that compiles, and has no option to turn that off.
"""

from __future__ import annotations

import re
from math import log10, prod

from jinja2 import Environment, nodes

MOST_FOLDED = 4_000_000
"""Maximum size of a constant that Jinja may compute, in characters or members. One of 4 million takes half a second."""
CAP = 10**12
"""Sizes above this are not told apart, so that no number here becomes large."""
GROWTH, LEAST_GROWN = 8, 100
"""A filter without arguments makes a text at most GROWTH times as long, as `tojson` does, or LEAST_GROWN characters
long, as `center` does."""
WIDE = re.compile(r"\*|\d{4}")
"""What a text must not contain to be formatted: a width from elsewhere, or one above 999."""
CONVERTED = 1500
"""Maximum characters of a number that is formatted with such a width."""
ARITHMETIC = (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow, nodes.UnaryExpr)
NUMBERS = ("int", "float")
"""Filters that make a text of digits a number."""
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


def check_constants(environment: Environment, template: str) -> None:
    """Parse a chat template without compiling it. Raises ValueError, which names the line and the operation, if Jinja
    would compute a large constant, or one whose size is not known, of constants; and TemplateSyntaxError if
    the template is no valid Jinja."""
    _size(environment.parse(template))


def _size(node: nodes.Node) -> float | None:
    """Return an upper bound of a constant expression's value: of its length, or of its amount if it is a number. None
    means that the expression is no constant. Raises ValueError if it, or an expression in it, must not be computed."""
    sizes = [_size(part) for part in node.iter_child_nodes()]
    if isinstance(node, nodes.Const):
        return _size_of_literal(node.value)
    if not isinstance(node, FOLDED) or (isinstance(node, nodes.Filter) and node.node is None):
        return None
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    size = min(CAP, _computed(node, known))
    if size > (CAP - 1 if isinstance(node, nodes.Pow) else MOST_FOLDED) and _grows(node):
        raise ValueError(f"line {node.lineno}: {_name(node)} of constants, which would take too long to compile")
    return size


def _size_of_literal(value: object) -> float:
    if isinstance(value, str):
        return max(1, len(value))
    return max(1, min(CAP, abs(value))) if isinstance(value, int | float) else 1


def _computed(node: nodes.Node, sizes: list[float]) -> float:
    """Return a bound of what a node makes of constants of these sizes."""
    if isinstance(node, nodes.Pow):
        is_small = all(map(_is_whole, node.iter_child_nodes())) and sizes[1] * log10(sizes[0]) < log10(CAP)
        return sizes[0] ** sizes[1] if is_small else CAP
    if isinstance(node, nodes.Div | nodes.FloorDiv):
        return CAP  # a number below 1 may divide
    if _formats(node):
        return _formatted(node, sizes)
    if isinstance(node, nodes.Mod):
        return sizes[1]
    if _filter(node) in NUMBERS:
        return CAP if max(sizes) > 6 else 10 ** max(sizes)
    if isinstance(node, nodes.Filter) and len(sizes) == 1:
        return max(LEAST_GROWN, GROWTH * sizes[0])
    return prod(sizes) if isinstance(node, nodes.Mul) or _grows(node) else max(1, sum(sizes))


def _grows(node: nodes.Node) -> bool:
    """Return whether a node's value may be longer than its parts together, or a number take long to compute."""
    if isinstance(node, nodes.Mul | nodes.Mod):
        return not _is_number(node)
    return isinstance(node, nodes.Pow) or (isinstance(node, nodes.Filter) and node.name not in NUMBERS)


def _is_number(node: nodes.Node) -> bool:
    """Return whether a node is an arithmetic expression of numbers."""
    if isinstance(node, nodes.Const):
        return isinstance(node.value, int | float)
    return isinstance(node, ARITHMETIC) and all(map(_is_number, node.iter_child_nodes()))


def _is_whole(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, int)


def _formats(node: nodes.Node) -> bool:
    return _filter(node) == "format" or (isinstance(node, nodes.Mod) and not _is_number(node.left))


def _formatted(node: nodes.Node, sizes: list[float]) -> float:
    """Return a bound of the length of a formatted text."""
    template, *values = node.iter_child_nodes()
    if not isinstance(template, nodes.Const) or WIDE.search(str(template.value)):
        return CAP
    lengths = (CONVERTED if _is_number(value) else GROWTH * size for value, size in zip(values, sizes[1:], strict=True))
    return sizes[0] * (CONVERTED + sum(lengths))


def _filter(node: nodes.Node) -> str:
    return node.name if isinstance(node, nodes.Filter) else ""


def _name(node: nodes.Node) -> str:
    """Return what an operator or a filter is called in messages."""
    return f"the filter {node.name}" if isinstance(node, nodes.Filter) else f"the operator {type(node).__name__}"
