"""Puts into a parsed chat template what counts while it is rendered: loops, comparisons, keys, slices and the operator
`~` become filters."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes

COUNTED, CONCATENATED, COMPARED, READ, SKIMMED, WRITTEN = (
    f"loralane_{name}" for name in ("counted", "concatenated", "compared", "read", "skimmed", "written")
)
"""Names of the filters that stand for loops, for the operator `~`, for comparisons, around keys, around what is sliced
or searched, and around what is written in what is compiled."""
TEXTS = (CONCATENATED, "tojson", "trim", "string")
"""Filters that return texts."""


def with_bounds(tree: nodes.Template) -> nodes.Template:
    """Put filters that count in place of comparisons and of the operator `~`, and around the sources of loops, around
    keys and around what is sliced, searched or written, and return the template."""
    _replace(tree)
    return tree


def _replace(node: nodes.Node) -> None:
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_replaced(one) for one in value])
        else:
            setattr(node, name, _replaced(value))


def _replaced(value: Any) -> Any:
    """Return what stands for a node in what is compiled."""
    if isinstance(value, nodes.Node):
        _replace(value)
    match value:
        case nodes.For():
            value.iter = _filter(value.iter, COUNTED)
        case nodes.Getitem(arg=nodes.Slice()):
            value.node = _filter(value.node, SKIMMED)
        case nodes.Getitem(arg=nodes.Expr()) if not isinstance(value.arg, nodes.Const):
            value.arg = value.arg if _is_number(value.arg) else _filter(value.arg, READ)
        case nodes.Pair() if not isinstance(value.key, nodes.Const):
            value.key = _filter(value.key, READ)
        case nodes.Output():
            value.nodes = [one if _is_text(one) else _filter(one, WRITTEN) for one in value.nodes]
        case nodes.Compare():
            return _counted_comparison(value)
        case nodes.Concat():
            parts = nodes.List(value.nodes, lineno=value.lineno)
            parts.environment = value.environment
            return _filter(parts, CONCATENATED)
    return value


def _is_text(node: nodes.Node) -> bool:
    """Return whether an expression can only have a text as its value, or fail."""
    if isinstance(node, nodes.Add):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, nodes.Filter):
        return node.name in TEXTS
    return isinstance(node, nodes.TemplateData | nodes.Const)


def _is_number(node: nodes.Node) -> bool:
    """Return whether an expression can only have a number as its value, or fail."""
    if isinstance(node, nodes.Add):
        return any(isinstance(one, nodes.Const) and isinstance(one.value, int) for one in (node.left, node.right))
    return isinstance(node, nodes.Sub | nodes.Neg)


def _counted_comparison(node: nodes.Compare) -> nodes.Expr:
    """Return what stands for a comparison. One with a constant takes no time, unless it searches."""
    if len(node.ops) > 1:
        node.expr = _filter(node.expr, READ)
        for one in node.ops:
            one.expr = _filter(one.expr, READ)
        return node
    (operand,) = node.ops
    searches = operand.op in ("in", "notin")
    if (not searches and isinstance(node.expr, nodes.Const)) or isinstance(operand.expr, nodes.Const):
        return node
    if isinstance(node.expr, nodes.Const):
        operand.expr = _filter(operand.expr, SKIMMED)
        return node
    made = _filter(node.expr, COMPARED)
    made.args = [nodes.Const(operand.op, lineno=node.lineno), operand.expr]
    return made


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    if node.environment is not None:
        made.set_environment(node.environment)
    return made
